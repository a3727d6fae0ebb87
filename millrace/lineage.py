"""Which policy versions still exist after trainers were rolled back to a checkpoint.

    incarnation 0   v0 ─ v1 ─ … ─ v20 ─ … ─ v25 ✗ killed           v20 was the last checkpoint
    incarnation 1                  └─ v21' ─ v22' ─ …              v21 … v25 of incarnation 0 are a future that is lost

A rollout sampled by a lost version is refused: its policy is not an ancestor of the one in training. Its prompt is
asked again (`millrace.position`).

Every checkpoint holds the lineage of the trainer that committed it, and a trainer that starts from a checkpoint commits
that one anew before it hands any weights over: so whoever holds weights can look their lineage up.
"""

from dataclasses import dataclass

from storage.checkpoints import Checkpoint, first_of
from storage.store import Store


@dataclass(frozen=True)
class Lineage:
    """The newest policy version of each incarnation that is an ancestor of the present policy."""

    incarnation: int
    """The present trainer's: all its versions exist."""
    until: dict[int, int]
    """Earlier incarnation → its last version that exists."""

    @classmethod
    def after(cls, checkpoint: Checkpoint | None, incarnation: int) -> "Lineage":
        """Of a trainer that starts as `incarnation` from `checkpoint`, or from the base model if there is none."""
        first = 0 if checkpoint is None else checkpoint.incarnation
        version = 0 if checkpoint is None else checkpoint.step
        until = {} if checkpoint is None else {int(k): v for k, v in checkpoint.state["lineage"].items()}
        # A trainer that died before its first checkpoint started, as this one does, from that very version.
        return cls(incarnation, until | dict.fromkeys(range(first, incarnation), version))

    @classmethod
    def of(cls, store: Store, incarnation: int) -> "Lineage":
        """Of the trainer that was started as `incarnation`, once it has handed weights over. Raises StreamCorrupt."""
        first = first_of(store, incarnation)
        if first is None:
            # Nothing to start from but the base model, as for every trainer before it.
            return cls.after(None, incarnation)
        return cls(incarnation, {int(k): v for k, v in first.state["lineage"].items()})

    def holds(self, incarnation: int, policy_version: int) -> bool:
        """Whether these weights are the present policy's or an ancestor's."""
        if incarnation == self.incarnation:
            return True
        return policy_version <= self.until.get(incarnation, -1)

    def to_json(self) -> dict[str, int]:
        """For a checkpoint's state."""
        return {str(incarnation): version for incarnation, version in sorted(self.until.items())}
