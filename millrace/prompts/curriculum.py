"""Which prompt each group has if past rewards decide: prompts that teach nothing now are asked less often.

    groups    0 … N−1 │ N … 2N−1 │ 2N … 3N−1 │ …                          N: as many as the staleness bound admits
    block        0    │    1     │     2     │
                                       ▲ decided by the generator that needs it first, before it admits a group of it
                                       │
    ║ consumed ║, steps before v ─► easy, hard ─► positions in the epochs ─► curriculum/00000002.json, put-if-absent

Here v is the version of that generator's weights. A block that is decided stays: every other generator reads it, and so
does one that makes a group again after a restart or a rollback. So group number and prompt belong together, as without
a curriculum (docs/decisions/04), but only the files record how.

curriculum/<block>.json    {"crc": …, "positions": [7, 8, 11, …], "num_prompts": 100, …}      sealed
"""

import dataclasses
from collections import defaultdict, deque
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count, pairwise
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from configs.prompts import PromptsConfig
from millrace.errors import PromptsError
from millrace.prompts.dataset import PromptOrder
from millrace.rollouts.lineage import Lineage
from millrace.types import Prompt
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import RESTORE, parse_as
from storage.schema import CONSUMED
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal
from storage.streams.stream import StreamReader

_GAP = 4
"""Easy and hard prompts are asked every fourth epoch, others in each."""
_RIGHT = 1.0
"""A response is right at this reward or more, as in evaluations."""


@dataclass(frozen=True, kw_only=True)
class PromptBlock:
    """The prompts of consecutive groups."""

    positions: list[int]
    """[groups] where each group's prompt is in the run's `PromptOrder`, ascending. Positions that are left out are of
    prompts that this epoch skips."""
    num_prompts: int
    """Training prompts that it was drawn from."""
    num_easy: int
    """How many of them were asked less often because they were easy."""
    num_hard: int
    """How many because they were hard."""


class _RewardedGroup(NamedTuple):
    """A consumed group whose rewards are known."""

    incarnation: int
    policy_version: int
    """The version that its step made."""
    group_id: int
    lowest: float
    """Its lowest reward."""
    highest: float


def read_block(store: Store, number: int) -> PromptBlock | None:
    """The block of that number; None if it is not decided. Raises StreamCorrupt."""
    path = layout.curriculum_block(number)
    try:
        return parse_block(bytes(store.get(path)), path)
    except NotInStore:
        return None


def write_block(store: Store, number: int, block: PromptBlock) -> bool:
    """Decides a block. Returns False if it was decided before; then it stays as it was."""
    return store.put_if_absent(layout.curriculum_block(number), seal(dataclasses.asdict(block)))


def parse_block(data: bytes, path: str) -> PromptBlock:
    """The block in the file `path` with the content `data`. Raises StreamCorrupt."""
    try:
        values = unseal(data)
    except ValueError as error:
        raise StreamCorrupt(path, f"it is {error}; {RESTORE}") from error
    block = parse_as(PromptBlock, values, path)
    if not block.positions or any(later <= earlier for earlier, later in pairwise([-1, *block.positions])):
        raise StreamCorrupt(path, f"its positions do not ascend; {RESTORE}")
    return block


def _groups_of(rows: pa.Table) -> list[_RewardedGroup]:
    """The groups with a known reward among `rows` of one part."""
    # A group of rolled-back weights is made again. Of a group in a damaged part not even the number is known.
    is_known = pc.and_(pc.is_finite(rows["reward"]), pc.greater_equal(rows["group_id"], 0))
    rows = rows.filter(pc.and_(is_known, pc.not_equal(rows["outcome"], "rolled_back")))
    keys = ["incarnation", "policy_version", "group_id"]
    groups = rows.group_by(keys).aggregate([("reward", "min"), ("reward", "max")])
    columns = [groups[name].to_pylist() for name in (*keys, "reward_min", "reward_max")]
    return [_RewardedGroup(*values) for values in zip(*columns, strict=True)]


class Curriculum:
    """The prompts of a run's groups, in blocks of `block_groups`: easy and hard ones are asked every fourth epoch.

        others         epoch 0     1     2     3     4     5
        easy or hard   epoch 0                       4

    Opening it reads the decided blocks. Raises StreamCorrupt for a damaged or missing block, and PromptsError if there
    are more or fewer `prompts` than when it was decided.
    """

    def __init__(
        self, store: Store, prompts: Sequence[Prompt], config: PromptsConfig, *, seed: int, block_groups: int
    ) -> None:
        assert config.curriculum_window is not None, "the run has no curriculum"
        self._store = store
        self._source = config.source
        self._window = config.curriculum_window
        self._prompts = prompts
        self._order = PromptOrder(prompts, seed=seed, shuffle=config.shuffle)
        self._block_groups = block_groups
        columns = ["incarnation", "policy_version", "group_id", "outcome", "reward"]
        self._consumed = StreamReader(store, layout.CONSUMED, CONSUMED, columns=columns)
        # What past groups earned, of rolled-back steps too. Parts that can't be read are skipped.
        self._past: list[_RewardedGroup] = []
        # Group number → index of its prompt, of all blocks that are known.
        self._asked: list[int] = []
        # Index of a prompt → the epoch in which it was asked last.
        self._last_epochs: dict[int, int] = {}
        self._next_position = 0
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
        if n < len(self._asked):
            return False
        self._read()
        if n >= len(self._asked) + self._block_groups:
            raise _missing(self._number, n)
        if n >= len(self._asked):
            block = self._draw_block(policy_version)
            if write_block(self._store, self._number, block):
                self._add(block)
            else:
                # Another generator was faster.
                self._read()
        return True

    def prompt_at(self, n: int) -> Prompt:
        """The prompt of group number `n`, whose block is decided."""
        return self._prompts[self._asked[n]]

    @property
    def _number(self) -> int:
        """Number of the first block that is not known."""
        return len(self._asked) // self._block_groups

    def _read(self, last_group: int = -1) -> None:
        """Reads which groups were consumed, and which blocks were decided."""
        # In this order: a group that was consumed is of a block that was decided before.
        for part in self._consumed.readable():
            self._past += _groups_of(part.table)
        while (block := read_block(self._store, self._number)) is not None:
            self._add(block)
        newest = max([last_group, *(group.group_id for group in self._past)])
        if newest >= len(self._asked):
            raise _missing(self._number, newest)

    def _add(self, block: PromptBlock) -> None:
        path = layout.curriculum_block(self._number)
        if block.num_prompts != len(self._prompts):
            raise PromptsError(
                f"{len(self._prompts)} training prompts",
                file=self._source,
                expected=f"{block.num_prompts}, as when {path} was written",
            )
        if len(block.positions) != self._block_groups:
            raise StreamCorrupt(path, f"it has {len(block.positions)} groups, expected {self._block_groups}")
        for position in block.positions:
            prompt = self._order.index_at(position)
            self._asked.append(prompt)
            self._last_epochs[prompt] = position // len(self._prompts)
        self._next_position = block.positions[-1] + 1
        self.newest = block

    def _draw_block(self, policy_version: int) -> PromptBlock:
        easy, hard = self._easy_and_hard(policy_version)
        rare = easy | hard
        positions: list[int] = []
        last_epochs = defaultdict(lambda: -_GAP, self._last_epochs)
        for position in count(self._next_position):
            prompt, epoch = self._order.index_at(position), position // len(self._prompts)
            if epoch - last_epochs[prompt] >= (_GAP if prompt in rare else 1):
                positions.append(position)
                last_epochs[prompt] = epoch
            if len(positions) == self._block_groups:
                break
        return PromptBlock(positions=positions, num_prompts=len(self._prompts), num_easy=len(easy), num_hard=len(hard))

    def _easy_and_hard(self, policy_version: int) -> tuple[set[int], set[int]]:
        """The prompts whose last groups were all right, and those whose last groups were all wrong.

        The last groups are those that steps before the one of `policy_version` consumed, without rolled-back steps.
        """
        assert self.lineage is not None, "switch_lineage comes first"
        recent: dict[int, deque[_RewardedGroup]] = defaultdict(lambda: deque(maxlen=self._window))
        for group in sorted(self._past, key=lambda group: group.group_id):
            if group.policy_version < policy_version and self.lineage.holds(group.incarnation, group.policy_version):
                recent[self._asked[group.group_id]].append(group)
        alike = {
            prompt: groups
            for prompt, groups in recent.items()
            if len(groups) == self._window and all(group.lowest == group.highest for group in groups)
        }
        easy = {prompt for prompt, groups in alike.items() if all(group.lowest >= _RIGHT for group in groups)}
        hard = {prompt for prompt, groups in alike.items() if all(group.lowest < _RIGHT for group in groups)}
        return easy, hard


def _missing(number: int, group: int) -> StreamCorrupt:
    return StreamCorrupt(
        layout.curriculum_block(number),
        f"it is missing, though group {group} was admitted; {RESTORE}",
    )
