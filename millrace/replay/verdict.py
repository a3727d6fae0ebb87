"""What came of training a stored run again: step by step, checkpoint by checkpoint, and where it first parted."""

from dataclasses import asdict, dataclass, field
from typing import Any, Literal


@dataclass(frozen=True, kw_only=True)
class CheckpointVerdict:
    """A stored checkpoint beside what the same steps come to now."""

    step: int
    stored_hash: str
    """Of the stored weights: XXH3 over names, dtypes, shapes and bytes, 32 hex digits."""
    hash: str
    """Of the weights trained again."""
    weights_difference: float
    """Largest absolute difference between two elements; infinite where tensors are missing or of another shape."""
    optimizer_identical: bool
    """The optimizer's state is the same bit for bit."""
    optimizer_difference: float
    """As `weights_difference`."""

    @property
    def identical(self) -> bool:
        """Bit for bit, the optimizer's state included."""
        return self.hash == self.stored_hash and self.optimizer_identical


@dataclass(frozen=True, kw_only=True)
class StepVerdict:
    """One step that was trained again, and did not differ beyond the tolerance."""

    step: int
    """Policy version that it made."""
    rollouts: int
    tokens: int
    """Response tokens of its rollouts."""
    logprobs_difference: float | None
    """Largest absolute difference of a token's log π before the step, nats; None where the run stored none."""
    checkpoint: CheckpointVerdict | None
    """None where none of that version is stored."""

    @property
    def identical(self) -> bool:
        """Bit for bit, as far as there was something to compare with."""
        return not self.logprobs_difference and (self.checkpoint is None or self.checkpoint.identical)


@dataclass(frozen=True, kw_only=True)
class Difference:
    """Where the stored run and its repetition first part."""

    step: int
    """Policy version whose step it is."""
    what: Literal["damage", "data", "logprobs", "weights"]
    """damage: a file is not what its writer committed; data: the rewards are not those that the run trained with."""
    sentence: str
    """What was found, and what is stored."""
    causes: tuple[str, ...] = ()
    """What is known that explains it, the likeliest first; empty: unknown."""


@dataclass(kw_only=True)
class Verdict:
    """The whole."""

    url: str
    from_step: int
    """Policy version it began with; 0: the start model."""
    tolerance: float | None
    """None: only what is the same bit for bit passes."""
    steps: int = 0
    """Steps trained again that passed."""
    rollouts: int = 0
    tokens: int = 0
    """Response tokens of these rollouts."""
    checkpoints: list[CheckpointVerdict] = field(default_factory=list)
    """Those compared."""
    inexact_step: int | None = None
    """The first step that is within the tolerance, but not the same bit for bit."""
    steps_without_logprobs: int = 0
    """Steps of which the run stored no log-probabilities: differences show at the next checkpoint only."""
    difference: Difference | None = None
    """What ended it early; None: nothing did."""
    unlike: dict[str, tuple[Any, Any]] = field(default_factory=dict)
    """What differs between where the run was trained and here, by name: (there, here)."""
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
