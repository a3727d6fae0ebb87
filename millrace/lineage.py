"""Which policy versions still exist after trainers were rolled back to a checkpoint.

    incarnation 0   v0 ─ v1 ─ … ─ v20 ─ … ─ v25 ✗ killed           v20 was the last checkpoint
    incarnation 1                  └─ v21' ─ v22' ─ …              v21 … v25 of incarnation 0 are a future that is lost

A rollout sampled by a lost version is refused: its policy is not an ancestor of the one in training.
"""

from dataclasses import dataclass

from storage.checkpoints import Checkpoint


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

    def holds(self, incarnation: int, policy_version: int) -> bool:
        """Whether these weights are the present policy's or an ancestor's."""
        if incarnation == self.incarnation:
            return True
        return policy_version <= self.until.get(incarnation, -1)

    def to_json(self) -> dict[str, int]:
        """For a checkpoint's state."""
        return {str(incarnation): version for incarnation, version in sorted(self.until.items())}
