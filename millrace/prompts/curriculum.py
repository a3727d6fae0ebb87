"""Which prompt each group has if past rewards decide: prompts that teach nothing now are asked less often.

    groups    0 … N−1 │ N … 2N−1 │ 2N … 3N−1 │ …                          N: as many as the staleness bound admits
    block        0    │    1     │     2     │
                                       ▲ decided by the generator that needs it first, before it admits a group of it
                                       │
    ║ consumed ║, steps before v ─► easy, hard ─► weights ─► turns ─► curriculum/00000002.json, put-if-absent

Here v is the version of that generator's weights. A block that is decided stays: every other generator reads it, and so
does one that makes a group again after a restart or a rollback. So group number and prompt belong together, as without
a curriculum (docs/decisions/04), but only the files record how.

curriculum/<block>.json    {"crc": …, "prompts": [7, 0, …], "turns": [0.0, 0.0, …], "num_prompts": 100, …}      sealed
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.prompts import PromptsConfig
from millrace.errors import PromptsError
from millrace.rollouts.lineage import Lineage
from millrace.types import Prompt
from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.schema import CONSUMED
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal
from storage.streams.stream import StreamReader

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Groups = npt.NDArray[np.void]
"""[groups] of `_GROUP`, in the order of the stream."""
_GROUP = np.dtype([(name, np.int64) for name in ("incarnation", "policy_version", "group_id", "outcome")])
"""A consumed group: the trainer's incarnation, the version that its step made, its number, and how its rewards were."""
_SPREAD, _SOLVED, _UNSOLVED = 0, 1, 2
_WEIGHT = 0.25
"""How often easy and hard prompts are asked, relative to the others."""
_RIGHT = 1.0
"""A response is right at this reward or more, as in evaluations."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """The prompts of consecutive groups."""

    prompts: list[int]
    """[groups] index of each group's prompt among the training prompts."""
    turns: list[float]
    """[groups] the turn at which it was asked, never falling; see `millrace.prompts.curriculum`."""
    num_prompts: int
    """Training prompts that it was drawn from."""
    num_easy: int
    """How many of them were asked less often because they were easy."""
    num_hard: int
    """How many because they were hard."""


def read_block(store: Store, number: int) -> Block | None:
    """The block of that number; None if it is not decided. Raises StreamCorrupt."""
    path = layout.curriculum_block(number)
    try:
        return parse_block(bytes(store.get(path)), path)
    except NotInStore:
        return None


def write_block(store: Store, number: int, block: Block) -> bool:
    """Decides a block. Returns False if it was decided before; then it stays as it was."""
    return store.put_if_absent(layout.curriculum_block(number), seal(dataclasses.asdict(block)))


def parse_block(data: bytes, path: str) -> Block:
    """The block in the file `path` with the content `data`. Raises StreamCorrupt."""
    try:
        values = unseal(data)
    except ValueError as error:
        raise StreamCorrupt(path, f"it is {error}; restore this file from a copy of the run") from error
    try:
        block = Block(**values)
        sound = (
            len(block.prompts) == len(block.turns) > 0
            and all(0 <= prompt < block.num_prompts for prompt in block.prompts)
            and all(earlier <= later for earlier, later in pairwise([0.0, *block.turns, math.inf]))
        )
    except TypeError:
        sound = False
    if not sound:
        raise StreamCorrupt(path, "expected a sealed object with a prompt and a turn for each group of a block")
    return block


def _groups_of(rows: pa.Table) -> Groups:
    """The groups with a known reward among `rows` of one part."""
    rewards = rows["reward"].to_numpy().astype(np.float32)
    numbers = rows["group_id"].to_numpy()
    # A group of rolled-back weights is made again. Of a group in a damaged part not even the number is known.
    has_reward = ~np.isnan(rewards) & (numbers >= 0) & (rows["outcome"].to_numpy() != "rolled_back")
    group_ids, first, place = np.unique(numbers[has_reward], return_index=True, return_inverse=True)
    lowest = np.full(len(group_ids), np.inf, dtype=np.float32)
    highest = np.full(len(group_ids), -np.inf, dtype=np.float32)
    np.minimum.at(lowest, place, rewards[has_reward])
    np.maximum.at(highest, place, rewards[has_reward])
    groups = np.empty(len(group_ids), dtype=_GROUP)
    groups["incarnation"] = rows["incarnation"].to_numpy()[has_reward][first]
    groups["policy_version"] = rows["policy_version"].to_numpy()[has_reward][first]
    groups["group_id"] = group_ids
    groups["outcome"] = np.where(lowest < highest, _SPREAD, np.where(lowest >= _RIGHT, _SOLVED, _UNSOLVED))
    return groups


def _before(groups: Groups, policy_version: int, lineage: Lineage) -> Groups:
    """The groups that steps before the one of `policy_version` consumed, without rolled-back steps."""
    newest = np.full(groups["incarnation"].max(initial=-1) + 1, -1, dtype=np.int64)
    for incarnation in range(len(newest)):
        current = incarnation == lineage.incarnation
        newest[incarnation] = policy_version if current else lineage.until.get(incarnation, -1)
    exists = groups["policy_version"] <= newest[groups["incarnation"]]
    remaining: Groups = groups[exists & (groups["policy_version"] < policy_version)]
    return remaining


class Curriculum:
    """The prompts of a run's groups, in blocks of `block_groups`, in proportion to their weights.

        weight 1     turn 0     1     2     3     4     5      a prompt asked at turn t is due again at t + 1/weight;
        weight 1/4   turn 0                       4            those due first are asked first, in a drawn order

    With equal weights these are epochs: every prompt once per turn. A prompt whose weight changes is due by its new one
    at once, and does not catch up on missed turns.

    Opening it reads the decided blocks. Raises StreamCorrupt for a damaged or missing block, and PromptsError if there
    are more or fewer `prompts` than when it was decided.
    """

    def __init__(
        self, store: Store, prompts: Sequence[Prompt], config: PromptsConfig, *, seed: int, block_groups: int
    ) -> None:
        self._store = store
        self._prompts = prompts
        self._config = config
        self._seed = seed
        self._block_groups = block_groups
        columns = ["incarnation", "policy_version", "group_id", "outcome", "reward"]
        self._consumed = StreamReader(store, layout.CONSUMED, CONSUMED, columns=columns)
        # What past groups earned, of rolled-back steps too. Parts that can't be read are skipped.
        self._past: Groups = np.empty(0, dtype=_GROUP)
        # The turn at which each prompt was asked last, and the newest turn.
        self._asked_at = np.full(len(prompts), -np.inf)
        self._now = 0.0
        # Group number → index of its prompt, of all blocks that are known.
        self._asked: list[int] = []
        self.lineage: Lineage | None = None
        self.newest: Block | None = None
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
        parts = [_groups_of(part.table) for part in self._consumed.readable()]
        self._past = np.concatenate([self._past, *parts])
        while (block := read_block(self._store, self._number)) is not None:
            self._add(block)
        newest = max(last_group, int(self._past["group_id"].max(initial=-1)))
        if newest >= len(self._asked):
            raise _missing(self._number, newest)

    def _add(self, block: Block) -> None:
        path = layout.curriculum_block(self._number)
        if block.num_prompts != len(self._prompts):
            raise PromptsError(
                f"{len(self._prompts)} training prompts",
                file=self._config.source,
                expected=f"{block.num_prompts}, as when {path} was written",
            )
        if len(block.prompts) != self._block_groups:
            raise StreamCorrupt(path, f"it has {len(block.prompts)} groups, expected {self._block_groups}")
        self._asked += block.prompts
        self._asked_at[block.prompts] = block.turns
        self._now = block.turns[-1]
        self.newest = block

    def _draw_block(self, policy_version: int) -> Block:
        assert self.lineage is not None, "switch_lineage comes first"
        groups = _before(self._past, policy_version, self.lineage)
        prompts_of = np.array(self._asked, dtype=np.int64)
        weights, num_easy, num_hard = _weigh(
            prompts_of[groups["group_id"]],
            groups,
            num_prompts=len(self._prompts),
            window=self._config.curriculum_window,
        )
        ranks = np.arange(len(self._prompts))
        if self._config.shuffle:
            ranks = np.random.Generator(np.random.PCG64([self._seed, self._number])).permutation(ranks)
        gaps = 1.0 / weights
        # A prompt that was never asked is due from the beginning.
        due = np.maximum(self._asked_at + gaps, 0.0)
        # Later prompts can't be reached.
        first = np.lexsort((ranks, due))[: self._block_groups].tolist()
        waiting = [(float(due[prompt]), int(ranks[prompt]), prompt) for prompt in first]
        prompts, turns, now = [], [], self._now
        for _ in range(self._block_groups):
            turn, rank, prompt = waiting[0]
            now = max(now, turn)
            prompts.append(prompt)
            turns.append(now)
            heapq.heapreplace(waiting, (now + float(gaps[prompt]), rank, prompt))
        return Block(prompts=prompts, turns=turns, num_prompts=len(self._prompts), num_easy=num_easy, num_hard=num_hard)


def _weigh(prompts: Ints, groups: Groups, *, num_prompts: int, window: int | None) -> tuple[Floats, int, int]:
    """[num_prompts] the weight of each prompt; how many are easy; how many are hard.

    `prompts` has the index of each group's prompt. A prompt with fewer than `window` groups is neither.
    """
    assert window is not None, "the run has no curriculum"
    newest_first = np.lexsort((-groups["group_id"], prompts))
    prompts, outcomes = prompts[newest_first], groups["outcome"][newest_first]
    # Rank of each group among those of its prompt.
    ranks = np.arange(len(prompts)) - np.searchsorted(prompts, prompts)
    recent = ranks < window
    easy, hard = (
        np.bincount(prompts[recent & (outcomes == outcome)], minlength=num_prompts) == window
        for outcome in (_SOLVED, _UNSOLVED)
    )
    weights = np.select([easy, hard], [_WEIGHT, _WEIGHT], 1.0)
    return weights, int(easy.sum()), int(hard.sum())


def _missing(number: int, group: int) -> StreamCorrupt:
    return StreamCorrupt(
        layout.curriculum_block(number),
        f"it is missing, though group {group} was admitted; restore this file from a copy of the run",
    )
