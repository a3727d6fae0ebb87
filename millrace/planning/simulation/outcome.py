"""What a simulated campaign came to."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from millrace.control.measured import Reading
from millrace.planning.simulation.clock import WallClock
from millrace.planning.simulation.group import Group


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """Figures of the steps after the warm-up, named and counted as `millrace status` does."""

    steps: int
    """That count."""
    step_seconds: float
    """Mean, from the end of one step to the end of the next."""
    tokens_per_second: float
    """Response tokens trained."""
    staleness_mean: float
    """Of the rollouts trained, policy versions; masked tokens aside."""
    staleness_max: int
    dropped_share: float
    """Of the rollouts that the trainer took."""
    masked_token_share: float
    """Of the response tokens trained."""
    length_ratio: float
    """Mean length of the rollouts trained ÷ of all that the trainer took."""
    idle: Mapping[str, float]
    """Share of the time that a stage had nothing to do, by stage: `generate`, `score`, `train`; mean over replicas."""
    places_taken: float
    """Mean share of the generators' places that held a request."""
    queued_groups: float
    """Mean number of groups that were scored and not taken."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Simulated failures by stage."""


@dataclass(frozen=True, slots=True)
class Admitted:
    """A group that a generator began."""

    t: float
    group_id: int
    generator: int
    policy_version: int
    """That of the generator's weights."""


@dataclass(frozen=True, slots=True)
class Trained:
    """An optimizer step."""

    t: float
    """Its end."""
    policy_version: int
    """The version that it made."""
    groups: tuple[int, ...]
    """Ascending."""
    dropped: tuple[int, ...]
    """Groups dropped since the step before, in order."""


@dataclass(slots=True)
class Trace:
    """Every admission and every step, in order: what the product is compared with."""

    admitted: list[Admitted] = field(default_factory=list)
    trained: list[Trained] = field(default_factory=list)
    readings: list[tuple[int, Reading]] = field(default_factory=list)
    """The bound of each step, policy versions, and what it measured, by the clock of the work."""

    def add(self, admitted: Sequence[tuple[float, Group]], trained: Sequence[Trained], clock: WallClock) -> None:
        """Adds a campaign's admissions, (time, group) in any order, and its steps, by the clock on the wall."""
        in_order = sorted(admitted, key=lambda one: (one[0], one[1].number))
        times = clock.at([t for t, _ in in_order]).tolist()
        self.admitted += [
            Admitted(t, group.number, group.generator, group.admitted_version)
            for t, (_, group) in zip(times, in_order, strict=True)
        ]
        times = clock.at([step.t for step in trained]).tolist()
        self.trained += [replace(step, t=t) for t, step in zip(times, trained, strict=True)]
