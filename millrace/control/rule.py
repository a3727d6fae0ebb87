"""Which staleness bound the next versions get: a pure rule over measurements of the steps.

    after each change: the steps that still train what was admitted before it; then windows of bound + 1 steps, and at
    least 3 or 8, of whose means the first line that holds decides
    ESS below its target                               bound down to where the ESS is expected at its target
    the last change did not gain enough                bound back
    another bound is expected to gain 2 % or more      that bound
    any three steps in a row: ESS below its floor      bound to its minimum

Expected gain: steps per second, each counted by its ESS and by the share of its tokens that are young enough to be
trained. bound + 1 steps are on their way. If trainer and generators both wait, more are needed, by as much as the time
that both wait is of the time that they work (Little's law). What lies ready all the time, beyond the next step's, is
too many, as CoDel judges a queue (Nichols and Jacobson, 2012). χ² = 1 / ESS − 1 grows with the square of the distance
between two policies. And the lost share of long responses falls with the steps that they may take. So one window
shows how far to go.

Each change is an experiment, because much is not in this picture: stages that share cores gain nothing from waiting
less. It stays if the gain rises by 5 % or a quarter of the expectation. Otherwise the bound goes back, and is
rejected for a number of steps that doubles each time, unless much more is expected by then. So the rule comes to rest,
and a stage that slows down is answered at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from statistics import fmean
from typing import Any, Literal

from configs.generation import GenerationConfig
from configs.operation import StalenessConfig

_NEVER_WAITS, _MOST_WAITS = 0.01, 0.95
"""Shares of waiting: below the first there is none, and above the second it says no more than that it is too much."""
_WHOLE = 0.98
"""Length ratio below which the bound is not lowered."""
_WORTH = 0.02
"""Expected gain for which the bound is changed."""
_FLOOR_STEPS = 3
_SHORT, _LONG, _MUCH = 3, 8, 0.25
"""Fewest steps of a window: where there is much to win, such as this share of a step's time, and where noise could hide
it."""
_PATIENCE, _MOST_PATIENCE = 32, 1024
"""Steps until a rejected bound is tried again: the first time, and at most."""
_MUCH_MORE = 2.0
"""Times the expected gain for which a rejected bound is tried again at once: it failed for another reason."""
_SERVED, _PLENTY = 0.25, 0.05
"""Share of the expected gain that a change has to bring; and the gain that is enough in any case."""
_OTHERWISE = 1.25
"""Times as long as the trainer waited before a raise, and the raise is not what made the difference."""


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
    def of(cls, before: Reading, readings: Sequence[Reading]) -> "Means":
        """Computes the means of the steps after `before`, one reading each."""
        last = readings[-1]
        seconds = last.trainer_seconds - before.trainer_seconds
        generating = last.generators_seconds - before.generators_seconds
        idle = last.generators_waited - before.generators_waited
        return cls(
            effective_sample_size=fmean(reading.effective_sample_size for reading in readings),
            length_ratio=fmean(reading.length_ratio for reading in readings),
            steps_ready=min(reading.steps_ready for reading in readings),
            trainer_waits=min(1.0, (last.trainer_waited - before.trainer_waited) / seconds) if seconds > 0 else 0.0,
            generators_wait=idle / generating if generating > 0 else 0.0,
            seconds_per_step=seconds / len(readings),
        )

    @property
    def gain(self) -> float:
        """Steps per second, each counted as the share of it that teaches."""
        return self.effective_sample_size * min(1.0, self.length_ratio) / self.seconds_per_step

    def expected_ess(self, other: int, bound: int) -> float:
        """ESS under another bound than the one that these are of."""
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


@dataclass(kw_only=True)
class RejectedBound:
    """A bound that gained too little: neither it nor any above it is tried until some version.

    Bounds that are rejected downwards are noted and looked up as negative numbers.
    """

    value: int | None = None
    until: int = 0
    patience: int = _PATIENCE
    expected_gain: float = 1.0
    """The gain that it was expected to bring, as a share."""

    def note(self, value: int, version: int, *, expected_gain: float = 1.0) -> None:
        """Rejects a bound. If it was rejected before and tried once more, the time doubles."""
        if version >= self.until:
            again = self.value is not None and value >= self.value
            self.patience = min(_MOST_PATIENCE, 2 * self.patience) if again else _PATIENCE
        self.value, self.until, self.expected_gain = value, version + self.patience, expected_gain

    def forbids(self, value: int, version: int, expected_gain: float) -> bool:
        """Whether `value` may not be tried at this version, with this expected gain."""
        if self.value is None or value < self.value or version >= self.until:
            return False
        return expected_gain <= _MUCH_MORE * self.expected_gain


@dataclass(frozen=True, kw_only=True)
class Experiment:
    """A change of the bound whose gain is not known yet."""

    before: int
    """The bound before it."""
    gain: float
    """As in `Means`, before it."""
    waiting: float
    """Seconds per step that the trainer waited."""
    expected: float
    """Gain, as a share."""

    def why_rejected(self, means: Means, bound: int) -> str | None:
        """Returns why the new bound is rejected, or None if it is kept or the result is inconclusive."""
        if means.gain >= self.gain * (1 + min(_PLENTY, _SERVED * self.expected)):
            return None
        if bound > self.before and means.trainer_waits * means.seconds_per_step > _OTHERWISE * self.waiting:
            # No raise makes the trainer wait longer: something else has changed meanwhile.
            return None
        return (
            f"the bound before it gave {self.gain:.3g} steps per second, counted by their effective sample size, and "
            f"this one {means.gain:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change, and why."""

    action: Literal["raise", "back", "lower", "floor"]
    max_staleness: int
    """The bound to move to, policy versions."""
    reason: str
    """One sentence, with the numbers."""
    measured: dict[str, float]
    """The measurements behind the reason, by name."""


def starting_bound(staleness: StalenessConfig, generation: GenerationConfig, groups_per_step: int) -> int:
    """Returns the lowest allowed bound at which all slots of the generators can be filled."""
    steps_in_flight = generation.groups_per_batch * generation.replicas / groups_per_step
    return min(max(ceil(steps_in_flight) - 1, staleness.min_staleness), staleness.max_staleness)


@dataclass(kw_only=True)
class Rule:
    """The rule above, with the bound that it has chosen."""

    limits: StalenessConfig
    bound: int
    too_low: RejectedBound = field(default_factory=RejectedBound)
    """The highest bound that gained nothing when it was lowered to."""
    too_high: RejectedBound = field(default_factory=RejectedBound)
    """The lowest bound that gained nothing when it was raised to, or at which the ESS was below its target."""
    experiment: Experiment | None = None

    def __post_init__(self) -> None:
        self._readings: list[Reading] = []
        self._before: Reading | None = None
        self._settling = self.bound + 1
        self._below_floor = 0

    def to_json(self) -> dict[str, Any]:
        """Returns its choice and its rejected bounds, as JSON for a checkpoint."""
        return {name: value for name, value in asdict(self).items() if name != "limits"}

    @classmethod
    def from_json(cls, values: Mapping[str, Any], limits: StalenessConfig) -> "Rule":
        """Inverts `to_json`, within `limits`, which may have changed since."""
        return cls(
            limits=limits,
            bound=min(max(values["bound"], limits.min_staleness), limits.max_staleness),
            too_low=RejectedBound(**values["too_low"]),
            too_high=RejectedBound(**values["too_high"]),
            experiment=values["experiment"] and Experiment(**values["experiment"]),
        )

    def step(self, reading: Reading, version: int) -> Decision | None:
        """Takes the reading of the step that made `version`; returns what changes from then on, if anything."""
        limits = self.limits
        is_low = reading.effective_sample_size < limits.ess_floor
        self._below_floor = self._below_floor + 1 if is_low else 0
        self._readings.append(reading)
        means = Means.of(self._before or self._readings[0], self._readings)
        if self._below_floor >= _FLOOR_STEPS and self.bound > limits.min_staleness:
            decision: Decision | None = self._go_to_floor(means, version)
        elif self._settling > 0:
            self._settling -= 1
            decision = None
        else:
            scarce = means.effective_sample_size < limits.ess_target
            fewest = _SHORT if scarce or means.trainer_waits > _MUCH else _LONG
            if len(self._readings) < max(self.bound + 1, fewest):
                return None
            decision = self._decide(means, version)
        self._before, self._readings = reading, []
        if decision is not None:
            # Groups admitted under the old bound are trained before those admitted under the new one.
            self._settling = 1 + (self.bound if decision.action == "raise" else max(self.bound, decision.max_staleness))
            self.bound, self._below_floor = decision.max_staleness, 0
        return decision

    def _go_to_floor(self, means: Means, version: int) -> Decision:
        self.too_high.note(self.bound, version)
        self.experiment = None
        reason = (
            f"the effective sample size was below the floor of {self.limits.ess_floor:g} in {_FLOOR_STEPS} steps in a "
            "row; nothing is admitted until the bound is down"
        )
        return Decision(action="floor", max_staleness=self.limits.min_staleness, reason=reason, measured=asdict(means))

    def _decide(self, means: Means, version: int) -> Decision | None:
        limits, bound, measured = self.limits, self.bound, asdict(means)
        experiment, self.experiment = self.experiment, None
        ess, target = means.effective_sample_size, limits.ess_target
        if ess < target and bound > limits.min_staleness:
            self.too_high.note(bound, version)
            reason = f"effective sample size {ess:.3f} is below the target of {target:g}"
            lower = min(bound - 1, self._affordable(means))
            return Decision(action="lower", max_staleness=lower, reason=reason, measured=measured)
        if experiment is not None and (why := experiment.why_rejected(means, bound)):
            if bound > experiment.before:
                self.too_high.note(experiment.before + 1, version, expected_gain=experiment.expected)
            else:
                self.too_low.note(-bound, version, expected_gain=experiment.expected)
            before = min(max(experiment.before, limits.min_staleness), limits.max_staleness)
            return Decision(action="back", max_staleness=before, reason=why, measured=measured)
        best, gain = self._best_bound(means, version)
        if gain < _WORTH:
            return None
        waiting = means.trainer_waits * means.seconds_per_step
        self.experiment = Experiment(before=bound, gain=means.gain, waiting=waiting, expected=gain)
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
            if other > bound:
                allowed = other <= self._affordable(means) and not self.too_high.forbids(other, version, gain)
            else:
                allowed = means.length_ratio >= _WHOLE and not self.too_low.forbids(-other, version, gain)
            if allowed and gain > most:
                best, most = other, gain
        return best, most

    def _affordable(self, means: Means) -> int:
        """Returns the highest bound at which the ESS is expected at its target; the minimum at least."""
        limits = self.limits
        for bound in range(limits.max_staleness, limits.min_staleness, -1):
            if means.expected_ess(bound, self.bound) >= limits.ess_target:
                return bound
        return limits.min_staleness
