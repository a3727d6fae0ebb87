"""The policy versions, and the rows of the trainer's streams, that survive a rollback to a checkpoint.

    incarnation 0   v0 ─ v1 ─ … ─ v20 ─ … ─ v25 ✗ killed           v20 was the last checkpoint
    incarnation 1                  └─ v21' ─ v22' ─ …              v21 … v25 of incarnation 0 are rolled back

A trajectory of a rolled-back version is refused: its policy is not an ancestor of the one in training. Its group is
generated again (`millrace.rollouts.group_sequence`).

Every checkpoint holds the lineage of its trainer. A trainer that starts from a checkpoint commits it again before it
hands over any weights, so the lineage of any weights can be looked up.
"""

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from storage.checkpoints import Checkpoint, first_of
from storage.stores.base import Store
from storage.streams.merged import PartFinder
from storage.streams.record import Record


@dataclass(frozen=True)
class Lineage:
    """The newest policy version of each incarnation that is an ancestor of the current policy."""

    incarnation: int
    """The current trainer's: all its versions exist."""
    until: dict[int, int]
    """Earlier incarnation → its last version that exists."""

    @classmethod
    def after(cls, checkpoint: Checkpoint | None, incarnation: int) -> "Lineage":
        """The lineage of a trainer that starts as `incarnation` from `checkpoint`, or from the base model."""
        if checkpoint is None:
            return cls(incarnation, dict.fromkeys(range(incarnation), 0))
        until = {int(k): v for k, v in checkpoint.state["lineage"].items()}
        # Trainers that died before their first checkpoint started from the same version as this one.
        return cls(incarnation, until | dict.fromkeys(range(checkpoint.incarnation, incarnation), checkpoint.step))

    @classmethod
    def of(cls, store: Store, incarnation: int) -> "Lineage":
        """The lineage of the trainer `incarnation`, once it has handed weights over. Raises StreamCorrupt."""
        first = first_of(store, incarnation)
        if first is None:
            # It started from the base model, as every trainer before it.
            return cls.after(None, incarnation)
        return cls(incarnation, {int(k): v for k, v in first.state["lineage"].items()})

    def holds(self, incarnation: int, policy_version: int) -> bool:
        """Whether these weights are the current policy's or an ancestor's."""
        if incarnation == self.incarnation:
            return True
        return policy_version <= self.until.get(incarnation, -1)

    def to_json(self) -> dict[str, int]:
        """JSON for a checkpoint's state."""
        return {str(incarnation): version for incarnation, version in sorted(self.until.items())}


class Survivors:
    """Which rows of the trainer's streams survive, judged by the rows alone, in the order of their stream.

    A restarted trainer repeats the steps after its checkpoint: the first row of a new incarnation, of version v,
    supersedes the rows of earlier incarnations that are of version v or later. Until that row arrives, all survive.
    """

    def __init__(self, newest: Mapping[int, int] | None = None) -> None:
        self.newest = dict(newest or {})
        """Incarnation → the newest of its policy versions that survives."""

    def see(self, incarnation: int, first: int, last: int) -> bool:
        """Takes note of rows of versions `first` to `last`. Returns whether they supersede earlier rows."""
        if incarnation in self.newest:
            self.newest[incarnation] = max(self.newest[incarnation], last)
            return False
        superseded = any(version >= first for version in self.newest.values())
        earlier = {number: min(version, first - 1) for number, version in self.newest.items()}
        self.newest = earlier | {incarnation: last}
        return superseded

    def see_rows(self, incarnations: npt.NDArray[np.int32], policy_versions: npt.NDArray[np.int64]) -> bool:
        """The same for [rows]."""
        starts = np.flatnonzero(np.diff(incarnations, prepend=incarnations[:1] - 1))
        superseded = False
        for start, versions in zip(starts, np.split(policy_versions, starts)[1:], strict=True):
            superseded |= self.see(int(incarnations[start]), int(versions[0]), int(versions.max()))
        return superseded

    def mask(
        self, incarnations: npt.NDArray[np.int32], policy_versions: npt.NDArray[np.int64]
    ) -> npt.NDArray[np.bool_]:
        """[rows] whether each survives, of incarnations seen before."""
        limits = np.full(max(self.newest, default=-1) + 1, -1, dtype=np.int64)
        limits[list(self.newest)] = list(self.newest.values())
        surviving: npt.NDArray[np.bool_] = policy_versions <= limits[incarnations]
        return surviving


def surviving(incarnations: npt.NDArray[np.int32], policy_versions: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
    """[rows] whether each row of a whole stream survives."""
    survivors = Survivors()
    survivors.see_rows(incarnations, policy_versions)
    return survivors.mask(incarnations, policy_versions)


def part_of_step(store: Store, path: str, step: int, incarnation: int | None = None) -> Record | None:
    """The first part of the trainer's stream in the folder `path` with rows of version `step`; None if there is none.

    Without the `incarnation` whose version survives, finds it by the rule of `Survivors`. Raises StreamCorrupt.
    """
    parts = PartFinder(store, path)
    if incarnation is None:
        incarnation = _surviving_incarnation(parts, step)
    record = parts.first(lambda record: (record.incarnation, record.max_policy_version) >= (incarnation, step))
    is_there = record is not None and record.incarnation == incarnation and record.min_policy_version <= step
    return record if is_there else None


def _surviving_incarnation(parts: PartFinder, step: int) -> int:
    """The last incarnation whose first rows are not newer than version `step`; -1 if there is none."""
    surviving = newest = -1

    def is_newer(record: Record) -> bool:
        return record.incarnation > newest

    while (first := parts.first(is_newer)) is not None:
        newest = first.incarnation
        if first.min_policy_version <= step:
            surviving = newest
    return surviving
