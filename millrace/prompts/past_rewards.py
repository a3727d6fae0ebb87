"""What past groups earned: which were all right, all wrong alike, or had spread, from the stream `consumed`.

║ consumed ║ ─► rows of each group ─► rewards all equal? ─no──► SPREAD
                                           │ yes
                                           └─► 1 or more ─► SOLVED, else ─► UNSOLVED
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.rollouts.lineage import Lineage
from storage import layout
from storage.schema import CONSUMED
from storage.stores.base import Store
from storage.streams.stream import StreamReader

SPREAD, SOLVED, UNSOLVED = 0, 1, 2
_COLUMNS = ["incarnation", "policy_version", "group_id", "outcome", "reward"]
_RIGHT = 1.0
"""A response is right at this reward or more, as in evaluations."""

Ints = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True, eq=False)
class PastGroups:
    """Groups that were consumed, in the order of the stream: four arrays of [groups]."""

    incarnation: Ints
    """Of the trainer that consumed it."""
    policy_version: Ints
    """Made by the step that consumed it."""
    group_id: Ints
    outcome: Ints
    """SPREAD, SOLVED or UNSOLVED."""

    def __getitem__(self, chosen: npt.NDArray[np.bool_]) -> "PastGroups":
        """Those where `chosen`, [groups], is true."""
        return PastGroups(
            incarnation=self.incarnation[chosen],
            policy_version=self.policy_version[chosen],
            group_id=self.group_id[chosen],
            outcome=self.outcome[chosen],
        )


class PastRewards:
    """Reads the stream as it grows. Parts that can't be read are passed over: the rewards in them are not known."""

    def __init__(self, store: Store) -> None:
        self._reader = StreamReader(store, layout.CONSUMED, CONSUMED, columns=_COLUMNS)
        self._groups = _groups_of(CONSUMED.empty_table())

    def read(self) -> PastGroups:
        """All groups consumed so far, those of rolled-back steps too. Raises StreamCorrupt for a damaged record."""
        parts = [self._groups, *(_groups_of(part.table) for part in self._reader.readable())]
        if len(parts) > 1:
            self._groups = PastGroups(
                incarnation=np.concatenate([part.incarnation for part in parts]),
                policy_version=np.concatenate([part.policy_version for part in parts]),
                group_id=np.concatenate([part.group_id for part in parts]),
                outcome=np.concatenate([part.outcome for part in parts]),
            )
        return self._groups


def before(groups: PastGroups, policy_version: int, lineage: Lineage) -> PastGroups:
    """The groups that steps before the one of `policy_version` consumed, without rolled-back steps."""
    newest = np.full(groups.incarnation.max(initial=-1) + 1, -1, dtype=np.int64)
    for incarnation in range(len(newest)):
        own = incarnation == lineage.incarnation
        newest[incarnation] = policy_version if own else lineage.until.get(incarnation, -1)
    exists = groups.policy_version <= newest[groups.incarnation]
    return groups[exists & (groups.policy_version < policy_version)]


def _groups_of(rows: pa.Table) -> PastGroups:
    """The groups with a known reward among `rows` of one part."""
    rewards = rows["reward"].to_numpy().astype(np.float32)
    numbers = rows["group_id"].to_numpy()
    # A group of rolled-back weights is made again. Of a group in a damaged part not even the number is known.
    known = ~np.isnan(rewards) & (numbers >= 0) & (rows["outcome"].to_numpy() != "rolled_back")
    group_ids, first, place = np.unique(numbers[known], return_index=True, return_inverse=True)
    lowest = np.full(len(group_ids), np.inf, dtype=np.float32)
    highest = np.full(len(group_ids), -np.inf, dtype=np.float32)
    np.minimum.at(lowest, place, rewards[known])
    np.maximum.at(highest, place, rewards[known])
    alike = np.where(lowest >= _RIGHT, SOLVED, UNSOLVED)
    return PastGroups(
        incarnation=rows["incarnation"].to_numpy()[known][first].astype(np.int64),
        policy_version=rows["policy_version"].to_numpy()[known][first],
        group_id=group_ids,
        outcome=np.where(lowest < highest, SPREAD, alike).astype(np.int64),
    )
