"""The result of training a stored run again: per step, per checkpoint, and the first difference."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointVerdict:
    """A stored checkpoint compared with the same version trained again."""

    step: int
    stored_hash: str
    """Of the stored weights: XXH3 over names, dtypes, shapes and bytes, 32 hex digits."""
    hash: str
    """Of the weights trained again."""
    weights_difference: float
    """Largest absolute difference between two elements; infinite if tensors are missing or differ in shape."""
    optimizer_identical: bool
    """The optimizer's state is equal bit for bit."""
    optimizer_difference: float
    """As `weights_difference`."""

    @property
    def identical(self) -> bool:
        """Bit for bit, the optimizer's state included."""
        return self.hash == self.stored_hash and self.optimizer_identical


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """One step that was trained again and passed."""

    step: int
    """Policy version that it made."""
    rollouts: int
    tokens: int
    """Response tokens of its trajectories."""
    logprobs_difference: float | None
    """Largest absolute difference of a token's log π before the step, nats; None if the run stored none."""
    checkpoint: CheckpointVerdict | None
    """None if none of that version is stored."""

    @property
    def identical(self) -> bool:
        """Bit for bit, as far as there was something to compare with."""
        return not self.logprobs_difference and (self.checkpoint is None or self.checkpoint.identical)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """The first difference between the stored run and its repetition."""

    step: int
    """Named by the policy version that it made."""
    what: Literal["damage", "data", "logprobs", "weights"]
    """damage: a file is not what its writer committed; data: rewards are not those that the run trained with."""
    sentence: str
    """What was found, and what is stored."""
    causes: tuple[str, ...] = ()
    """Known explanations, the most likely first; empty: unknown."""


@dataclass(kw_only=True)
class Verdict:
    """All steps."""

    url: str
    from_step: int
    """Policy version it started from; 0: the start model."""
    tolerance: float | None
    """None: only bit-for-bit equality passes."""
    steps: int = 0
    """Steps trained again that passed."""
    rollouts: int = 0
    tokens: int = 0
    """Response tokens of these trajectories."""
    checkpoints: list[CheckpointVerdict] = field(default_factory=list)
    """Those compared."""
    inexact_step: int | None = None
    """First step that is within the tolerance but not equal bit for bit."""
    steps_without_logprobs: int = 0
    """Steps without stored log-probabilities: differences show only at the next checkpoint."""
    difference: Difference | None = None
    """None: everything passed."""
    unlike: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What differs between the original environment and this one, by name: (there, here)."""
    seconds: float = 0.0

    @property
    def sentence(self) -> str:
        """The verdict, for people."""
        if self.difference is not None:
            if self.difference.what == "damage":
                return f"step {self.difference.step} can't be trained again: {self.difference.sentence}"
            causes = "; ".join(self.difference.causes) or "unknown"
            return f"step {self.difference.step} differs: {self.difference.sentence} (cause: {causes})"
        num_checkpoints = f"{len(self.checkpoints)} checkpoint{'' if len(self.checkpoints) == 1 else 's'}"
        done = f"steps {self.from_step + 1} to {self.from_step + self.steps} and {num_checkpoints}"
        exact = "the same bit for bit"
        if self.inexact_step is not None:
            exact = f"the same within {self.tolerance:g}, bit for bit up to step {self.inexact_step - 1}"
        without = f"; the run stored no log-probabilities of {self.steps_without_logprobs} of these steps"
        return f"{done} are {exact}{without if self.steps_without_logprobs else ''}"

    def add(self, step: StepVerdict) -> None:
        """Counts a step that passed."""
        self.steps += 1
        self.rollouts += step.rollouts
        self.tokens += step.tokens
        self.steps_without_logprobs += step.logprobs_difference is None
        if step.checkpoint is not None:
            self.checkpoints.append(step.checkpoint)
        if not step.identical and self.inexact_step is None:
            self.inexact_step = step.step

    def to_json(self) -> dict[str, Any]:
        """All of it; an infinite difference as null."""
        values = asdict(self) | {"sentence": self.sentence}
        for checkpoint in values["checkpoints"]:
            for name in ("weights_difference", "optimizer_difference"):
                checkpoint[name] = checkpoint[name] if checkpoint[name] < float("inf") else None
        return values
