"""Which staleness bound and how many places the next versions get: a pure rule over what the steps measured.

    after each change: the steps that still train what was admitted before it; then windows of bound + 1 steps, and at
    least 3 or 8, of whose means the first line that holds decides
    ESS below its target                               bound down to where the ESS is expected at its target
    the last change did not gain what it was for       bound back
    trainer waits, and generators are busy             places up by as much as the trainer is faster
    another bound is expected to gain 2 % or more      that bound
    trainer never waits, generators do, and the ESS
        has lost half of what it may                   as many places as they keep busy, and a quarter more
    any three steps in a row: ESS below its floor      bound to its minimum

It starts with the lowest bound at which all places can be filled.

What a bound is expected to gain: steps per second, each counted by its ESS and by the share of its tokens that are
young enough to be trained. bound + 1 steps are on their way. If both sides wait, more are needed, by as much as the
time that both wait is of the time that they work (Little's law). What lies ready all the time, beyond the next
step's, is too many, as CoDel judges a queue (Nichols and Jacobson, 2012). χ² = 1 / ESS − 1 grows with the square of
the distance between two policies. And what is lost of long responses falls with the steps that they may take. So one
window tells how far to go.

Each change is an experiment, because much is not in this picture: stages that share cores gain nothing from waiting
less. It stays if the gain rises by 5 % or a quarter of what was expected. Otherwise the bound goes back, and is
rejected for a number of steps that doubles each time, unless much more is expected by then. So the rule comes to rest,
and a stage that slows down is answered at once.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, Literal

from configs.generation import GenerationConfig
from configs.operation import StalenessConfig

_NEVER_WAITS, _MOST_WAITS = 0.01, 0.95
"""Shares of waiting: below the first there is none, and above the second it says no more than that it is too much."""
_WAITS = 0.05
"""Share of a step's time above which the trainer waits."""
_IDLE, _MOSTLY_BUSY = 0.05, 0.2
"""Shares of the generators' time without work: above the first they need room, below the second places are not cut."""
_WHOLE = 0.98
"""Length ratio below which the bound is not lowered."""
_SCARCE = 0.5
"""Share of what the ESS may lose, above which generators get fewer places for fresher groups."""
_WORTH = 0.02
"""Expected gain for which the bound is changed."""
_ESS_TARGET, _ESS_FLOOR = 0.95, 0.5
_FLOOR_STEPS = 3
_SHORT, _LONG = 3, 8
"""Fewest steps of a window: where there is much to win, and where noise could hide it."""
_MUCH = 0.25
"""Share of a step's time."""
_PATIENCE, _MOST_PATIENCE = 32, 1024
"""Steps until a rejected value is tried again: the first time, and at most."""
_MUCH_MORE = 2.0
"""Times as much to win, and a rejected value is tried again at once: what it failed at was something else."""
_SERVED, _PLENTY = 0.25, 0.05
"""Share of the expected gain that a change has to bring; and the gain that is enough in any case."""
_OTHERWISE = 1.25
"""Times as long as the trainer waited before a raise, and the raise is not what made the difference."""

Action = Literal["raise", "back", "lower", "floor", "places"]


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one step measured. Seconds are sums since the trainer started."""

    effective_sample_size: float
    """Of the ratios π/μ, before any clipping, as a share of its value on policy."""
    length_ratio: float
    """Mean length of what the step trained ÷ of what was taken for it."""
    steps_ready: float
    """Scored groups that lie ready when the step is done, in steps' worth."""
    trainer_waited: float
    trainer_seconds: float
    generators_waited: float
    """Summed over all generators."""
    generators_seconds: float


@dataclass(frozen=True, kw_only=True)
class Means:
    """Means of a window of steps."""

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
        """Those of the steps after `before`, one reading each."""
        last, count = readings[-1], len(readings)
        seconds = last.trainer_seconds - before.trainer_seconds
        generating = last.generators_seconds - before.generators_seconds
        idle = last.generators_waited - before.generators_waited
        return cls(
            effective_sample_size=sum(reading.effective_sample_size for reading in readings) / count,
            length_ratio=sum(reading.length_ratio for reading in readings) / count,
            steps_ready=min(reading.steps_ready for reading in readings),
            trainer_waits=(last.trainer_waited - before.trainer_waited) / seconds if seconds > 0 else 0.0,
            generators_wait=idle / generating if generating > 0 else 0.0,
            seconds_per_step=seconds / count,
        )

    @property
    def gain(self) -> float:
        """Steps per second, each counted as the share of it that teaches."""
        return self.effective_sample_size * (1 - self._lost) / self.seconds_per_step

    @property
    def _lost(self) -> float:
        """Share of the tokens that were too old to be trained."""
        return max(0.0, 1 - self.length_ratio)

    def expected_ess(self, other: int, bound: int) -> float:
        """ESS under another bound than the one that these are of."""
        chi_square = 1 / max(self.effective_sample_size, 1e-9) - 1
        return 1 / (1 + chi_square * (other / max(1, bound)) ** 2)

    def expected_gain(self, other: int, bound: int) -> float:
        """As `gain`, in other units."""
        both_wait = min(self.trainer_waits, self.generators_wait, _MOST_WAITS)
        if both_wait > _NEVER_WAITS:
            needed = (bound + 1) / (1 - both_wait)
        else:
            # The groups of the next step have to lie ready, or the trainer would wait for them.
            needed = bound + 1 - max(0.0, self.steps_ready - 1)
        lost = min(1.0, self._lost * (bound + 1) / (other + 1))
        return self.expected_ess(other, bound) * (1 - lost) / max(1.0, needed / (other + 1))


@dataclass(kw_only=True)
class RejectedBound:
    """A value that did not serve: neither it nor any above it is tried until some version.

    Values that are rejected downwards are noted and asked for as negative numbers.
    """

    value: int | None = None
    until: int = 0
    patience: int = _PATIENCE
    expected_gain: float = 1.0
    """What it was expected to gain, as a share."""

    def note(self, value: int, version: int, *, expected_gain: float = 1.0) -> None:
        """Rejects a value. If it was rejected before and tried once more, it is left alone twice as long."""
        if version >= self.until:
            again = self.value is not None and value >= self.value
            self.patience = min(_MOST_PATIENCE, 2 * self.patience) if again else _PATIENCE
        self.value, self.until, self.expected_gain = value, version + self.patience, expected_gain

    def forbids(self, value: int, version: int, expected_gain: float = 0.0) -> bool:
        """Whether `value` is left alone at this version, though it is expected to gain so much."""
        if self.value is None or value < self.value or version >= self.until:
            return False
        return expected_gain <= _MUCH_MORE * self.expected_gain


@dataclass(kw_only=True)
class Experiment:
    """A change of the bound, until it has shown what it gains: what was before, and what is expected."""

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
            f"the bound of before gave {self.gain:.3g} steps per second, counted by their effective sample size, and "
            f"this one {means.gain:.3g}"
        )


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the rule may choose from, and what it aims at."""

    min_staleness: int
    max_staleness: int
    filled: int
    """The lowest bound at which all places can be filled, of those between the two."""
    group_size: int
    """Fewest places of a generator."""
    max_places: int
    ess_target: float
    """The bound falls while the effective sample size of π/μ, as a share of what it is on policy, is below this …"""
    ess_floor: float
    """… and at once to `min_staleness` after some steps below this."""

    @classmethod
    def of(
        cls, staleness: StalenessConfig, generation: GenerationConfig, *, groups_per_step: int, max_places: int
    ) -> "Limits":
        """Those of a config, whose generators have so many places each at most."""
        steps_in_flight = max_places * generation.replicas / (groups_per_step * generation.group_size)
        lowest = min(1, staleness.max_staleness)
        return cls(
            min_staleness=lowest,
            max_staleness=staleness.max_staleness,
            filled=min(max(ceil(steps_in_flight) - 1, lowest), staleness.max_staleness),
            group_size=generation.group_size,
            max_places=max_places,
            ess_target=_ESS_TARGET,
            ess_floor=_ESS_FLOOR,
        )


@dataclass(frozen=True, kw_only=True)
class Decision:
    """A change, and why."""

    action: Action
    max_staleness: int
    """The bound to move to, policy versions."""
    places: int
    """Requests that a generator may have in flight."""
    reason: str
    """One sentence, with the numbers."""
    measured: dict[str, float]
    """What the reason rests on, by name."""


@dataclass(kw_only=True)
class Rule:
    """The rule above, with the bound and the places that it has chosen."""

    limits: Limits
    max_staleness: int
    places: int
    too_low: RejectedBound = field(default_factory=RejectedBound)
    """The highest bound that gained nothing when it was lowered to."""
    too_high: RejectedBound = field(default_factory=RejectedBound)
    """The lowest bound that gained nothing when it was raised to, or at which the ESS was below its target."""
    too_few: RejectedBound = field(default_factory=RejectedBound)
    """The most places with which the trainer had to wait though generators were busy."""
    experiment: Experiment | None = None

    def __post_init__(self) -> None:
        self._readings: list[Reading] = []
        self._before: Reading | None = None
        self._settling = self.max_staleness + 1
        self._below_floor = 0

    @classmethod
    def start(cls, limits: Limits) -> "Rule":
        """The rule at the beginning of a run: all places, and a bound that fills them."""
        return cls(limits=limits, max_staleness=limits.filled, places=limits.max_places)

    def to_json(self) -> dict[str, Any]:
        """Returns what it has chosen and what it rejects, as JSON for a checkpoint."""
        values = asdict(self)
        del values["limits"]
        return values

    @classmethod
    def from_json(cls, values: Mapping[str, Any], limits: Limits) -> "Rule":
        """The inverse of `to_json`, within `limits`, which may have changed since."""
        return cls(
            limits=limits,
            max_staleness=min(max(values["max_staleness"], limits.min_staleness), limits.max_staleness),
            places=min(max(values["places"], limits.group_size), limits.max_places),
            **{name: RejectedBound(**values[name]) for name in ("too_low", "too_high", "too_few")},
            experiment=values["experiment"] and Experiment(**values["experiment"]),
        )

    def step(self, reading: Reading, version: int) -> Decision | None:
        """Takes the reading of the step that made `version`; returns what changes from then on, if anything."""
        low = reading.effective_sample_size < self.limits.ess_floor
        self._below_floor = self._below_floor + 1 if low else 0
        self._readings.append(reading)
        means = Means.of(self._before or self._readings[0], self._readings)
        if self._below_floor >= _FLOOR_STEPS and self.max_staleness > self.limits.min_staleness:
            return self._apply(self._to_floor(means, version))
        if self._settling > 0:
            self._settling -= 1
            self._begin_window()
            return None
        scarce = means.effective_sample_size < self.limits.ess_target
        fewest = _SHORT if scarce or means.trainer_waits > _MUCH else _LONG
        if len(self._readings) < max(self.max_staleness + 1, fewest):
            return None
        self._begin_window()
        decision = self._decide(means, version)
        return None if decision is None else self._apply(decision)

    def _begin_window(self) -> None:
        self._before, self._readings = self._readings[-1], []

    def _apply(self, decision: Decision) -> Decision:
        # What was admitted under the old bound is trained before what is admitted under the new one.
        waits = decision.action == "raise"
        self._settling = 1 + (self.max_staleness if waits else max(self.max_staleness, decision.max_staleness))
        self.max_staleness, self.places = decision.max_staleness, decision.places
        self._below_floor = 0
        return decision

    def _to_floor(self, means: Means, version: int) -> Decision:
        self.too_high.note(self.max_staleness, version)
        self._begin_window()
        self.experiment = None
        reason = (
            f"the effective sample size was below the floor of {self.limits.ess_floor:g} in {_FLOOR_STEPS} steps in a "
            "row; nothing is admitted until the bound is down"
        )
        return self._decision("floor", means, reason, max_staleness=self.limits.min_staleness)

    def _decide(self, means: Means, version: int) -> Decision | None:
        limits, bound = self.limits, self.max_staleness
        experiment, self.experiment = self.experiment, None
        if means.effective_sample_size < limits.ess_target and bound > limits.min_staleness:
            self.too_high.note(bound, version)
            ess, target = means.effective_sample_size, limits.ess_target
            reason = f"effective sample size {ess:.3f} is below the target of {target:g}"
            return self._decision("lower", means, reason, max_staleness=min(bound - 1, self._affordable(means)))
        if experiment is not None and (why := experiment.why_rejected(means, bound)):
            if bound > experiment.before:
                self.too_high.note(experiment.before + 1, version, expected_gain=experiment.expected)
            else:
                self.too_low.note(-bound, version, expected_gain=experiment.expected)
            before = min(max(experiment.before, limits.min_staleness), limits.max_staleness)
            return self._decision("back", means, why, max_staleness=before)
        at_work = f"the trainer waits {means.trainer_waits:.0%} of its time, generators {means.generators_wait:.0%}"
        if means.trainer_waits > _WAITS and means.generators_wait <= _IDLE and self.places < limits.max_places:
            self.too_few.note(-self.places, version)
            places = min(limits.max_places, ceil(self.places / (1 - min(_MOST_WAITS, means.trainer_waits))))
            return self._decision("places", means, at_work, places=places)
        best, gain = self._best_bound(means, version)
        if gain < _WORTH or best == bound:
            return self._fewer_places(means, version, at_work)
        self.experiment = Experiment(
            before=bound,
            gain=means.gain,
            waiting=means.trainer_waits * means.seconds_per_step,
            expected=gain,
        )
        reason = (
            f"{at_work}, groups for {means.steps_ready:.1f} steps lie ready all the time, effective sample size "
            f"{means.effective_sample_size:.3f}, length trained ÷ taken {means.length_ratio:.3f}: a bound of "
            f"{best} is expected to gain {gain:.0%}"
        )
        return self._decision("raise" if best > bound else "lower", means, reason, max_staleness=best)

    def _best_bound(self, means: Means, version: int) -> tuple[int, float]:
        """Returns the bound that is expected to gain most, of those that may be tried now, and that gain as a share."""
        limits, bound = self.limits, self.max_staleness
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
            if means.expected_ess(bound, self.max_staleness) >= limits.ess_target:
                return bound
        return limits.min_staleness

    def _fewer_places(self, means: Means, version: int, at_work: str) -> Decision | None:
        scarce = 1 - means.effective_sample_size > _SCARCE * (1 - self.limits.ess_target)
        if means.trainer_waits >= _NEVER_WAITS or not scarce:
            return None
        kept = max(self.limits.group_size, ceil(1.25 * self.places * (1 - means.generators_wait)))
        if means.generators_wait <= _MOSTLY_BUSY or kept > 0.8 * self.places or self.too_few.forbids(-kept, version):
            return None
        return self._decision("places", means, at_work, places=kept)

    def _decision(self, action: Action, means: Means, reason: str, **changes: int) -> Decision:
        same = {"max_staleness": self.max_staleness, "places": self.places}
        return Decision(action=action, reason=reason, measured=asdict(means), **{**same, **changes})
