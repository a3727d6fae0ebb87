"""Which staleness bound the next versions get: a pure rule over measurements of the steps.

    after each change: the steps that still train groups admitted before it; then windows of bound + 1 steps, and at
    least 5. The first line that holds for a window's means decides:
    ESS below its target                               bound down to where the ESS is expected at its target
    the last change did not gain enough                bound back
    another bound is expected to gain 2 % or more      that bound

Expected gain: steps per second, each counted by its ESS and by the share of its tokens that are young enough to be
trained. bound + 1 steps are on their way. If trainer and generators both wait, more are needed, by as much as the time
that both wait is of the time that they work (Little's law). Groups that lie ready all the time, beyond the next step's,
are too many, as CoDel judges a queue (Nichols and Jacobson, 2012). χ² = 1 / ESS − 1 grows with the square of the
distance between two policies. And the lost share of long responses falls with the steps that they may take. So one
window shows how far to go.

Each change is an experiment, because this leaves much out: stages that share cores gain nothing from waiting less. It
stays if the gain rises by 5 % or a quarter of the expectation. Otherwise the bound goes back, and no change in that
direction is tried for 128 steps, unless much more is expected by then. So the rule comes to rest, and a stage that
slows down is answered at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean
from typing import Any, Literal

from configs.operation import StalenessConfig

_NEVER_WAITS, _MOST_WAITS = 0.01, 0.95
"""Shares of waiting: below the first there is none, and above the second it says no more than that it is too much."""
_WHOLE = 0.98
"""Length ratio below which the bound is not lowered."""
_WORTH = 0.02
"""Expected gain for which the bound is changed."""
_LEAST_STEPS = 5
"""Of a window."""
_PATIENCE = 128
"""Steps until a direction that was rejected is tried again."""
_MUCH_MORE = 2.0
"""Times the expected gain for which it is tried again at once: it failed for another reason."""
_SERVED, _PLENTY = 0.25, 0.05
"""Share of the expected gain that a change has to bring; and the gain that is enough in any case."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """Measurements of one step. Seconds are sums since the trainer started."""

    effective_sample_size: float
    """Of the ratios π/μ, before any clipping, as a share of its value on policy."""
    length_ratio: float
    """Mean length of the responses trained ÷ of those taken for the step."""
    steps_ready: float
    """Scored groups that lie ready when the step is done, in steps' worth."""
    trainer_waited: float
    trainer_seconds: float
    generators_waited: float
    """Summed over all generators."""
    generators_seconds: float


@dataclass(frozen=True, kw_only=True)
class Means:
    """Means over a window of steps."""

    effective_sample_size: float
    length_ratio: float
    steps_ready: float
    """The fewest of any step."""
    trainer_waits: float
    """Share of its time."""
    generators_wait: float
    """Share of their time, for room or weights."""
    seconds_per_step: float

    @classmethod
    def of(cls, readings: Sequence[Reading]) -> "Means":
        """Computes the means of the steps after the first of these readings."""
        first, *window = readings
        last = window[-1]
        seconds = last.trainer_seconds - first.trainer_seconds
        generating = last.generators_seconds - first.generators_seconds
        idle = last.generators_waited - first.generators_waited
        return cls(
            effective_sample_size=fmean(reading.effective_sample_size for reading in window),
            length_ratio=fmean(reading.length_ratio for reading in window),
            steps_ready=min(reading.steps_ready for reading in window),
            trainer_waits=min(1.0, (last.trainer_waited - first.trainer_waited) / seconds) if seconds > 0 else 0.0,
            generators_wait=idle / generating if generating > 0 else 0.0,
            seconds_per_step=seconds / len(window),
        )

    @property
    def gain(self) -> float:
        """Steps per second, each counted as the share of it that teaches."""
        return self.effective_sample_size * min(1.0, self.length_ratio) / self.seconds_per_step

    def expected_ess(self, other: int, bound: int) -> float:
        """Predicts the effective sample size under another bound."""
        chi_square = 1 / max(self.effective_sample_size, 1e-9) - 1
        return 1 / (1 + chi_square * (other / max(1, bound)) ** 2)

    def expected_gain(self, other: int, bound: int) -> float:
        """Gain under another bound, in other units than `gain`."""
        both_wait = min(self.trainer_waits, self.generators_wait, _MOST_WAITS)
        if both_wait > _NEVER_WAITS:
            needed = (bound + 1) / (1 - both_wait)
        else:
            # The groups of the next step have to lie ready, or the trainer would wait for them.
            needed = bound + 1 - max(0.0, self.steps_ready - 1)
        lost = min(1.0, max(0.0, 1 - self.length_ratio) * (bound + 1) / (other + 1))
        return self.expected_ess(other, bound) * (1 - lost) / max(1.0, needed / (other + 1))


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A change of the bound whose gain is not known yet."""

    previous_bound: int
    gain: float
    """As in `Means`, under the previous bound."""
    expected: float
    """Gain, as a share."""


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change, and why."""

    action: Literal["raise", "back", "lower"]
    max_staleness: int
    """The bound to move to, policy versions."""
    reason: str
    """One sentence, with the numbers."""
    measured: dict[str, float]
    """The measurements behind the reason, by name."""


@dataclass(kw_only=True)
class StalenessRule:
    """The rule above, with the bound that it has chosen."""

    limits: StalenessConfig
    bound: int
    rejected: dict[str, tuple[int, float]] = field(default_factory=dict)
    """`raise` or `lower` → (version until which it is not tried, gain that was expected of it)."""

    def __post_init__(self) -> None:
        self._experiment: Experiment | None = None
        # The last reading of the window before, and those of this window.
        self._readings: list[Reading] = []
        self._settling = self.bound + 1

    def to_json(self) -> dict[str, Any]:
        """Returns its choice and its rejections, as JSON for a checkpoint."""
        return {"bound": self.bound, "rejected": {action: list(values) for action, values in self.rejected.items()}}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], limits: StalenessConfig) -> "StalenessRule":
        """Inverts `to_json`, within `limits`, which may have changed since."""
        bound = min(max(values["bound"], limits.min_staleness), limits.max_staleness)
        rejected = {action: (int(until), float(gain)) for action, (until, gain) in values["rejected"].items()}
        return cls(limits=limits, bound=bound, rejected=rejected)

    def step(self, reading: Reading, version: int) -> Decision | None:
        """Takes the reading of the step that made `version`; returns what changes from then on, if anything."""
        self._readings.append(reading)
        decision = None
        if self._settling > 0:
            self._settling -= 1
        elif len(self._readings) <= max(self.bound + 1, _LEAST_STEPS):
            return None
        else:
            decision = self._decide(Means.of(self._readings), version)
        self._readings = [reading]
        if decision is not None:
            # Groups admitted under the old bound are trained before those admitted under the new one.
            self._settling = 1 + self.bound
            self.bound = decision.max_staleness
        return decision

    def _decide(self, means: Means, version: int) -> Decision | None:
        limits, bound, measured = self.limits, self.bound, asdict(means)
        experiment, self._experiment = self._experiment, None
        ess, target = means.effective_sample_size, limits.ess_target
        if ess < target and bound > limits.min_staleness:
            self.rejected["raise"] = version + _PATIENCE, 1.0
            reason = f"effective sample size {ess:.3f} is below the target of {target:g}"
            lower = min(bound - 1, self._affordable(means))
            return Decision(action="lower", max_staleness=lower, reason=reason, measured=measured)
        if experiment and means.gain < experiment.gain * (1 + min(_PLENTY, _SERVED * experiment.expected)):
            self.rejected["raise" if bound > experiment.previous_bound else "lower"] = (
                version + _PATIENCE,
                experiment.expected,
            )
            reason = (
                f"the bound before it gave {experiment.gain:.3g} steps per second, counted by their effective sample "
                f"size, and this one {means.gain:.3g}"
            )
            return Decision(action="back", max_staleness=experiment.previous_bound, reason=reason, measured=measured)
        best, gain = self._best_bound(means, version)
        if gain < _WORTH:
            return None
        self._experiment = Experiment(previous_bound=bound, gain=means.gain, expected=gain)
        reason = (
            f"the trainer waits {means.trainer_waits:.0%} of its time, generators {means.generators_wait:.0%}, groups "
            f"for {means.steps_ready:.1f} steps lie ready all the time, effective sample size {ess:.3f}, length "
            f"trained ÷ taken {means.length_ratio:.3f}: a bound of {best} is expected to gain {gain:.0%}"
        )
        action: Literal["raise", "lower"] = "raise" if best > bound else "lower"
        return Decision(action=action, max_staleness=best, reason=reason, measured=measured)

    def _best_bound(self, means: Means, version: int) -> tuple[int, float]:
        """Returns the bound that is expected to gain most, of those that may be tried now, and that gain as a share."""
        limits, bound = self.limits, self.bound
        now = means.expected_gain(bound, bound)
        best, most = bound, 0.0
        # At 0 nothing overlaps, so the trainer always waits: only too low an ESS makes that worth while.
        for other in range(max(1, limits.min_staleness), limits.max_staleness + 1):
            gain = means.expected_gain(other, bound) / now - 1
            until, rejected_gain = self.rejected.get("raise" if other > bound else "lower", (0, 0.0))
            allowed = other <= self._affordable(means) if other > bound else means.length_ratio >= _WHOLE
            if allowed and gain > most and (version >= until or gain > _MUCH_MORE * rejected_gain):
                best, most = other, gain
        return best, most

    def _affordable(self, means: Means) -> int:
        """Returns the highest bound at which the ESS is expected at its target; the minimum at least."""
        limits = self.limits
        for bound in range(limits.max_staleness, limits.min_staleness, -1):
            if means.expected_ess(bound, self.bound) >= limits.ess_target:
                return bound
        return limits.min_staleness
