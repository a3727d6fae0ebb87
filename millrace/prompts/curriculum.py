"""Chooses prompts by the rewards of past groups.

║ consumed ║ ─► the groups of steps before v ─┬─► prompts that were always right, or never: asked every fourth epoch
                                              ├─► share of right responses of the last ten steps ─► solved?
                                              └─► dropped groups, which their source makes up for
"""

from collections import defaultdict, deque
from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import pyarrow as pa
import pyarrow.compute as pc

from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.lineage import Lineage
from storage import layout
from storage.schema import CONSUMED
from storage.stores.base import Store
from storage.streams.stream import StreamReader

_RIGHT = 1.0
"""A response is right at this reward or more, as in evaluations."""
_RECENT_STEPS = 10
_KEYS = ["incarnation", "policy_version", "group_id"]


class PastGroup(NamedTuple):
    """A consumed group."""

    incarnation: int
    policy_version: int
    """The version that its step made."""
    group_id: int
    lowest: float | None
    """Its lowest reward; None if no reward is known."""
    highest: float | None
    num_rewards: int
    """Responses with a reward."""
    num_right: int
    is_trained: bool
    """Whether a step trained any of its responses."""


class PastGroups:
    """The consumed groups of a run, of rolled-back steps too. Parts that can't be read are skipped."""

    def __init__(self, store: Store) -> None:
        self._consumed = StreamReader(store, layout.CONSUMED, CONSUMED, columns=[*_KEYS, "outcome", "reward"])
        self._groups: list[PastGroup] = []

    @property
    def newest(self) -> int:
        """The highest group number, or −1."""
        return max((group.group_id for group in self._groups), default=-1)

    def read(self) -> None:
        """Reads the groups consumed since the last call."""
        for part in self._consumed.readable():
            self._groups += _groups_of(part.table)

    def before(self, policy_version: int, lineage: Lineage) -> list[PastGroup]:
        """Groups consumed before the step that made `policy_version`, without rolled-back steps, sorted by group id."""
        found = [
            group
            for group in self._groups
            if group.policy_version < policy_version and lineage.holds(group.incarnation, group.policy_version)
        ]
        return sorted(found, key=lambda group: group.group_id)


def _groups_of(rows: pa.Table) -> list[PastGroup]:
    # A group of rolled-back weights is made again. Of a group in a damaged part not even the number is known.
    rows = rows.filter(pc.and_(pc.greater_equal(rows["group_id"], 0), pc.not_equal(rows["outcome"], "rolled_back")))
    known = pc.is_finite(rows["reward"])
    right = pc.and_(known, pc.greater_equal(rows["reward"], _RIGHT))
    counted = rows.append_column("right", pc.fill_null(right, False).cast(pa.int64()))
    counted = counted.append_column("trained", pc.equal(rows["outcome"], TRAINED))
    groups = counted.group_by(_KEYS).aggregate(
        [("reward", "min"), ("reward", "max"), ("reward", "count"), ("right", "sum"), ("trained", "any")]
    )
    names = (*_KEYS, "reward_min", "reward_max", "reward_count", "right_sum", "trained_any")
    return [PastGroup(*values) for values in zip(*(groups[name].to_pylist() for name in names), strict=True)]


def easy_and_hard(
    groups: Iterable[PastGroup], prompt_of_group: Mapping[int, int], window: int
) -> tuple[set[int], set[int]]:
    """The prompts whose last `window` groups were all right, and those whose last groups were all wrong.

    `groups` by number; `prompt_of_group` has those of the source, and the index of the prompt of each.
    """
    recent: dict[int, deque[PastGroup]] = defaultdict(lambda: deque(maxlen=window))
    for group in groups:
        if group.group_id in prompt_of_group and group.num_rewards:
            recent[prompt_of_group[group.group_id]].append(group)
    alike = {
        prompt: last
        for prompt, last in recent.items()
        if len(last) == window and all(group.lowest == group.highest for group in last)
    }
    easy = {prompt for prompt, last in alike.items() if all(group.num_right for group in last)}
    hard = {prompt for prompt, last in alike.items() if not any(group.num_right for group in last)}
    return easy, hard


def accuracy(groups: Iterable[PastGroup], of_source: Collection[int], policy_version: int) -> float | None:
    """Share of right responses among the source's groups of the last ten steps; None without such a response."""
    recent = [
        group
        for group in groups
        if group.group_id in of_source and group.policy_version >= policy_version - _RECENT_STEPS
    ]
    num_rewards = sum(group.num_rewards for group in recent)
    return sum(group.num_right for group in recent) / num_rewards if num_rewards else None
