"""Which source and which prompt each group has, where weights, past rewards or dropped groups decide.

    groups    0 … N−1 │ N … 2N−1 │ 2N … 3N−1 │ …                          N: as many as the staleness bound admits
    block        0    │    1     │     2     │
                                       ▲ decided by the generator that needs it first, before it admits a group of it
                                       │
    weights of the sources at version v ──────► the source of each group ─┐
    ║ consumed ║, steps before v ─► curriculum.py ─► easy, hard, dropped ─┴─► prompt_blocks/00000002.json, put-if-absent

Here v is the version of that generator's weights. A block that is decided stays: every other generator reads it, and so
does one that makes a group again after a restart or a rollback.

Each group goes to the source that is furthest behind its share, so that shares are exact to a few groups after any
number of groups. A group that the trainer drops does not count: its source gets another, up to four times its share.
"""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any

import numpy as np

from configs.sources import SourceConfig, naming_source
from configs.task import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.blocks import PromptBlock, SourceBlock, read_block, write_block
from millrace.prompts.curriculum import PastGroup, PastGroups, accuracy, easy_and_hard
from millrace.prompts.dataset import PromptOrder
from millrace.rollouts.lineage import Lineage
from millrace.types import Prompt
from storage import layout
from storage.errors import StreamCorrupt
from storage.json_text import RESTORE
from storage.stores.base import Store

_GAP = 4
"""Easy and hard prompts are asked every fourth epoch, others in each. A solved source has a fourth of its weight, and
one whose groups are dropped gets four times its share of a block at most."""


@dataclass(kw_only=True)
class MixedSource:
    """A source, and how far its prompts have been given to groups."""

    prompts: Sequence[Prompt]
    """Its training prompts, at least one."""
    config: PromptsConfig
    mixing: SourceConfig
    seed: int
    credit: float = 0.0
    """Groups that it has had too few of, as in `SourceBlock`."""
    num_dropped: int = 0
    next_position: int = 0
    last_epochs: dict[int, int] = field(default_factory=dict)
    """Index of a prompt → the epoch in which it was asked last."""
    prompt_of_group: dict[int, int] = field(default_factory=dict)
    """Group number → index of its prompt."""

    def __post_init__(self) -> None:
        self.order = PromptOrder(self.prompts, seed=self.seed, shuffle=self.config.shuffle)

    def weight(self, policy_version: int, past: Sequence[PastGroup]) -> float:
        """Its weight for the groups that the weights of this version sample."""
        mixing = self.mixing
        weight = mixing.weight
        if mixing.final_weight is not None and mixing.weight_steps is not None:
            weight += (mixing.final_weight - weight) * min(1.0, policy_version / mixing.weight_steps)
        if mixing.solved_at is not None:
            share = accuracy(past, self.prompt_of_group, policy_version)
            weight /= _GAP if share is not None and share >= mixing.solved_at else 1
        return weight

    def add(self, block: SourceBlock, first_group: int, path: str) -> None:
        """Adds the groups of a block, which is stored in `path`. Raises PromptsError."""
        num_prompts = len(self.prompts)
        if block.num_prompts != num_prompts:
            expected = f"{block.num_prompts}, as when {path} was written"
            raise PromptsError(f"{num_prompts} training prompts", file=self.config.source, expected=expected)
        for group, position in zip(block.groups, block.positions, strict=True):
            prompt = self.order.index_at(position)
            self.prompt_of_group[first_group + group] = prompt
            self.last_epochs[prompt] = position // num_prompts
            self.next_position = position + 1
        self.credit, self.num_dropped = block.credit, block.num_dropped

    def draw(self, num_groups: int, past: Sequence[PastGroup]) -> dict[str, Any]:
        """Prompts for its groups of the next block: the fields of `SourceBlock` about them."""
        easy, hard = set[int](), set[int]()
        if (window := self.config.curriculum_window) is not None:
            easy, hard = easy_and_hard(past, self.prompt_of_group, window)
        rare = easy | hard
        positions: list[int] = []
        last_epochs = defaultdict(lambda: -_GAP, self.last_epochs)
        for position in count(self.next_position):
            if len(positions) == num_groups:
                break
            prompt, epoch = self.order.index_at(position), position // len(self.prompts)
            if epoch - last_epochs[prompt] >= (_GAP if prompt in rare else 1):
                positions.append(position)
                last_epochs[prompt] = epoch
        return {
            "positions": positions,
            "num_prompts": len(self.prompts),
            "num_easy": len(easy),
            "num_hard": len(hard),
        }


class Mixture:
    """The prompts of a run's groups, in blocks of `block_groups`.

    Opening it reads the decided blocks. Raises StreamCorrupt for a damaged or missing block, and PromptsError, which
    names the source, if it has more or fewer prompts than when the block was decided.
    """

    def __init__(self, store: Store, sources: Mapping[str, MixedSource], *, seed: int, block_groups: int) -> None:
        self._store = store
        self._sources = dict(sources)
        self._block_groups = block_groups
        self._past = PastGroups(store)
        # The source of each group, of all blocks that are known.
        self._source_of_group: list[str] = []
        # Only the order of sources depends on it.
        begin = np.random.Generator(np.random.PCG64(seed)).random(len(self._sources))
        for source, credit in zip(self._sources.values(), begin - begin.mean(), strict=True):
            source.credit = float(credit)
        self.lineage: Lineage | None = None
        self.newest: PromptBlock | None = None
        """The newest block that is known."""
        self._read()

    def switch_lineage(self, lineage: Lineage, last_group: int) -> None:
        """Continues under weights of this lineage. `last_group` is the highest group that was sampled, or less than 0.

        Raises StreamCorrupt if its block is missing.
        """
        self.lineage = lineage
        self._read(last_group)

    def decide(self, n: int, policy_version: int) -> bool:
        """Decides the block of group number `n`, if it is not decided; weights of `policy_version` will sample it.

        Returns whether a block was decided or read. All groups of earlier blocks must have been decided, and
        `switch_lineage` been called. Raises as opening does.
        """
        num_known = len(self._source_of_group)
        if n < num_known:
            return False
        self._read()
        num_known = len(self._source_of_group)
        if n >= num_known + self._block_groups:
            raise _missing(self._number, n)
        if n >= num_known:
            block = self._draw_block(policy_version)
            if write_block(self._store, self._number, block):
                self._add(block)
            else:
                # Another generator was faster.
                self._read()
        return True

    def prompt_at(self, n: int) -> tuple[str, Prompt]:
        """The source and the prompt of group number `n`, whose block is decided."""
        source = self._source_of_group[n]
        return source, self._sources[source].prompts[self._sources[source].prompt_of_group[n]]

    @property
    def _number(self) -> int:
        """Number of the first block that is not known."""
        return len(self._source_of_group) // self._block_groups

    def _read(self, last_group: int = -1) -> None:
        """Reads which groups were consumed, and which blocks were decided."""
        # In this order: a group that was consumed is of a block that was decided before.
        self._past.read()
        while (block := read_block(self._store, self._number)) is not None:
            self._add(block)
        newest = max(last_group, self._past.newest)
        if newest >= len(self._source_of_group):
            raise _missing(self._number, newest)

    def _add(self, block: PromptBlock) -> None:
        path, first = layout.prompt_block(self._number), len(self._source_of_group)
        names = {group: name for name, source in block.sources.items() for group in source.groups}
        if len(names) != self._block_groups or not block.sources.keys() <= self._sources.keys():
            raise StreamCorrupt(
                path,
                f"it has {len(names)} groups of {', '.join(block.sources)}; expected {self._block_groups} of "
                f"{', '.join(self._sources)}",
            )
        for name, of_source in block.sources.items():
            with naming_source(name):
                self._sources[name].add(of_source, first, path)
        self._source_of_group += [names[group] for group in range(self._block_groups)]
        self.newest = block

    def _draw_block(self, policy_version: int) -> PromptBlock:
        assert self.lineage is not None, "switch_lineage comes first"
        past = self._past.before(policy_version, self.lineage)
        untrained = [group.group_id for group in past if not group.is_trained]
        weights = {name: source.weight(policy_version, past) for name, source in self._sources.items()}
        dropped = {
            name: sum(group in source.prompt_of_group for group in untrained) for name, source in self._sources.items()
        }
        groups, credits = self._divide(weights, dropped)
        return PromptBlock(
            policy_version=policy_version,
            sources={
                name: SourceBlock(
                    groups=groups[name],
                    **source.draw(len(groups[name]), past),
                    weight=weights[name],
                    credit=credits[name],
                    num_dropped=dropped[name],
                )
                for name, source in self._sources.items()
            },
        )

    def _divide(
        self, weights: Mapping[str, float], dropped: Mapping[str, int]
    ) -> tuple[dict[str, list[int]], dict[str, float]]:
        """The groups of the next block by source, and the credits after it."""
        total = sum(weights.values())
        shares = {name: weight / total for name, weight in weights.items()}
        # Without a limit, a source whose groups are all dropped would soon get every group.
        lost = {
            name: min(dropped[name] - source.num_dropped, (_GAP - 1) * shares[name] * self._block_groups)
            for name, source in self._sources.items()
        }
        num_lost = sum(lost.values())
        credits = {name: source.credit + lost[name] - shares[name] * num_lost for name, source in self._sources.items()}
        groups: dict[str, list[int]] = {name: [] for name in self._sources}
        for group in range(self._block_groups):
            for name, share in shares.items():
                credits[name] += share
            # The first of equals.
            chosen = max(credits, key=credits.__getitem__)
            credits[chosen] -= 1
            groups[chosen].append(group)
        return groups, credits


def _missing(number: int, group: int) -> StreamCorrupt:
    return StreamCorrupt(layout.prompt_block(number), f"it is missing, though group {group} was admitted; {RESTORE}")
