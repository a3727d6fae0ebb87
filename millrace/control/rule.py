"""Which staleness bound and how many places the next versions get: a pure rule over what the steps measured.

    after each change: the steps that still train what was admitted before it; then windows of bound + 1 steps, and at
    least 3 or 8, of whose means the first line that holds decides
    ESS below its target                               bound down to where the ESS is expected at its target
    the last change did not gain what it was for       bound back
    trainer waits, and generators are busy             places by as much as the trainer is faster
    another bound is expected to gain 2 % or more      that bound
    trainer never waits, generators do, and the ESS
        lacks half of what it may                      places as many as they keep busy, and a quarter more
    any three steps in a row: ESS below its floor      bound to its minimum

It starts with the lowest bound at which all places can be filled.

What a bound is expected to gain: steps per second, each counted by its ESS and by the share of its tokens that are
young enough to be trained. bound + 1 steps are on their way. If both sides wait, more are needed, by as much as the
time that both wait is of the time that they work (Little's law). What lies ready all the time, beyond the next
step's, is too many, as CoDel judges a queue (Nichols and Jacobson, 2012). χ² = 1 / ESS − 1 grows with the square of
the distance between two policies. And what is lost of long responses falls with the steps that they may take. So one
window tells how far to go.

Each change is a trial, for much is not in this picture: stages that share cores gain nothing from waiting less. It
stays if the gain rises by 5 % or a quarter of what was expected. Else the bound goes back, and is left alone for a
number of steps that doubles each time, unless much more is expected by then. So it comes to rest, and a stage that
slows down is answered at once.
"""

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, Literal

from configs.generation import GenerationConfig
from configs.operation import StalenessConfig
from millrace.control.avoided import Avoided
from millrace.control.measured import MOST_WAITS, NEVER_WAITS, Means, Reading, means
from millrace.control.trial import Trial

_WAITS = 0.05
"""Share of a step's time above which the trainer waits."""
_IDLE, _MOSTLY_BUSY = 0.05, 0.2
"""Shares of the generators' time without work: above the first they lack room, below the second places are not cut."""
_WHOLE = 0.98
"""Length ratio below which the bound is not lowered."""
_SCARCE = 0.5
"""Share of what the ESS may lack, above which generators get fewer places for fresher groups."""
_WORTH = 0.02
"""Expected gain for which the bound is changed."""
_FLOOR_STEPS = 3
_SHORT, _LONG = 3, 8
"""Fewest steps of a window: where there is much to win, and where noise could hide it."""
_MUCH = 0.25
"""Share of a step's time."""

Action = Literal["raise", "back", "lower", "floor", "places"]


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
    ess_floor: float

    @classmethod
    def of(
        cls, staleness: StalenessConfig, generation: GenerationConfig, *, groups_per_step: int, max_places: int
    ) -> "Limits":
        """Those of a config, whose generators have so many places each at most."""
        group_size = generation.group_size
        steps_in_flight = max_places * generation.replicas / (groups_per_step * group_size)
        return cls(
            min_staleness=staleness.min_staleness,
            max_staleness=staleness.max_staleness,
            filled=min(max(ceil(steps_in_flight) - 1, staleness.min_staleness), staleness.max_staleness),
            group_size=group_size,
            max_places=max_places,
            ess_target=staleness.ess_target,
            ess_floor=staleness.ess_floor,
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
    too_low: Avoided = field(default_factory=Avoided)
    """The highest bound that gained nothing when it was lowered to."""
    too_high: Avoided = field(default_factory=Avoided)
    """The lowest bound that gained nothing when it was raised to, or at which the ESS was below its target."""
    too_few: Avoided = field(default_factory=Avoided)
    """The most places with which the trainer had to wait though generators were busy."""
    trial: Trial | None = None

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
        """What it has chosen and what it avoids, as JSON for a checkpoint."""
        return {
            "max_staleness": self.max_staleness,
            "places": self.places,
            "too_low": asdict(self.too_low),
            "too_high": asdict(self.too_high),
            "too_few": asdict(self.too_few),
            "trial": None if self.trial is None else asdict(self.trial),
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], limits: Limits) -> "Rule":
        """The inverse of `to_json`, within `limits`, which may have changed since."""
        trial = values.get("trial")
        return cls(
            limits=limits,
            max_staleness=min(max(values["max_staleness"], limits.min_staleness), limits.max_staleness),
            places=min(max(values["places"], limits.group_size), limits.max_places),
            too_low=Avoided(**values["too_low"]),
            too_high=Avoided(**values["too_high"]),
            too_few=Avoided(**values["too_few"]),
            trial=None if trial is None else Trial.from_json(trial),
        )

    def step(self, reading: Reading, version: int) -> Decision | None:
        """Takes the reading of the step that made `version`; what changes from then on, if anything."""
        low = reading.effective_sample_size < self.limits.ess_floor
        self._below_floor = self._below_floor + 1 if low else 0
        self._readings.append(reading)
        found = means(self._before or self._readings[0], self._readings)
        if self._below_floor >= _FLOOR_STEPS and self.max_staleness > self.limits.min_staleness:
            return self._change(self._floor(found, version))
        if self._settling > 0:
            self._settling -= 1
            self._begin_window()
            return None
        scarce = found.effective_sample_size < self.limits.ess_target
        fewest = _SHORT if scarce or found.trainer_waits > _MUCH else _LONG
        if len(self._readings) < max(self.max_staleness + 1, fewest):
            return None
        self._begin_window()
        return self._change(self._by_means(found, version))

    def _begin_window(self) -> None:
        self._before, self._readings = self._readings[-1], []

    def _change(self, decision: Decision | None) -> Decision | None:
        if decision is not None:
            # What was admitted under the old bound is trained before what is admitted under the new one.
            waits = decision.action == "raise"
            self._settling = 1 + (self.max_staleness if waits else max(self.max_staleness, decision.max_staleness))
            self.max_staleness, self.places = decision.max_staleness, decision.places
            self._below_floor = 0
        return decision

    def _floor(self, found: Means, version: int) -> Decision:
        self.too_high.note(self.max_staleness, version)
        self._begin_window()
        self.trial = None
        return self._decision(
            "floor",
            found,
            f"the effective sample size was below the floor of {self.limits.ess_floor:g} in {_FLOOR_STEPS} steps in a "
            "row; nothing is admitted until the bound is down",
            max_staleness=self.limits.min_staleness,
        )

    def _by_means(self, found: Means, version: int) -> Decision | None:
        limits, bound = self.limits, self.max_staleness
        trial, self.trial = self.trial, None
        if found.effective_sample_size < limits.ess_target and bound > limits.min_staleness:
            self.too_high.note(bound, version)
            ess, target = found.effective_sample_size, limits.ess_target
            reason = f"effective sample size {ess:.3f} is below the target of {target:g}"
            return self._decision("lower", found, reason, max_staleness=min(bound - 1, self._affordable(found)))
        if trial is not None and (failed := trial.failed(found, bound)):
            self._note_failed(trial, version)
            before = min(max(trial.before, limits.min_staleness), limits.max_staleness)
            return self._decision("back", found, failed, max_staleness=before)
        at_work = f"the trainer waits {found.trainer_waits:.0%} of its time, generators {found.generators_wait:.0%}"
        if found.trainer_waits > _WAITS and found.generators_wait <= _IDLE and self.places < limits.max_places:
            self.too_few.note(-self.places, version)
            places = min(limits.max_places, ceil(self.places / (1 - min(MOST_WAITS, found.trainer_waits))))
            return self._decision("places", found, at_work, places=places)
        wanted, gain = self._best(found, version)
        if gain >= _WORTH and wanted != bound:
            reason = (
                f"{at_work}, groups for {found.steps_ready:.1f} steps lie ready all the time, effective sample size "
                f"{found.effective_sample_size:.3f}, length trained ÷ taken {found.length_ratio:.3f}: a bound of "
                f"{wanted} is expected to gain {gain:.0%}"
            )
            return self._try(found, wanted, reason, gain)
        return self._fewer_places(found, version, at_work)

    def _best(self, found: Means, version: int) -> tuple[int, float]:
        """The bound that is expected to gain most, of those that may be tried now, and that gain as a share."""
        limits, bound = self.limits, self.max_staleness
        needed = found.steps_needed(bound)
        now = found.expected_gain(bound, bound, needed)
        best, most = bound, 0.0
        # At 0 nothing overlaps, so the trainer always waits: only too low an ESS makes that worth while.
        for wanted in range(max(1, limits.min_staleness), limits.max_staleness + 1):
            gain = found.expected_gain(wanted, bound, needed) / now - 1
            if wanted > bound:
                allowed = wanted <= self._affordable(found) and not self.too_high.forbids(wanted, version, gain)
            else:
                allowed = found.length_ratio >= _WHOLE and not self.too_low.forbids(-wanted, version, gain)
            if allowed and gain > most:
                best, most = wanted, gain
        return best, most

    def _try(self, found: Means, wanted: int, reason: str, expected: float) -> Decision:
        self.trial = Trial(
            before=self.max_staleness,
            gain=found.gain,
            waiting=found.trainer_waits * found.seconds_per_step,
            expected=expected,
        )
        action: Action = "raise" if wanted > self.max_staleness else "lower"
        return self._decision(action, found, reason, max_staleness=wanted)

    def _affordable(self, found: Means) -> int:
        """The highest bound at which the ESS is expected at its target; the minimum at least."""
        most, bound = self.limits.max_staleness, self.max_staleness
        bounds = range(most, self.limits.min_staleness, -1)
        return next(
            (one for one in bounds if found.expected_ess(one, bound) >= self.limits.ess_target),
            self.limits.min_staleness,
        )

    def _fewer_places(self, found: Means, version: int, at_work: str) -> Decision | None:
        scarce = 1 - found.effective_sample_size > _SCARCE * (1 - self.limits.ess_target)
        if found.trainer_waits >= NEVER_WAITS or not scarce:
            return None
        kept = max(self.limits.group_size, ceil(1.25 * self.places * (1 - found.generators_wait)))
        if found.generators_wait <= _MOSTLY_BUSY or kept > 0.8 * self.places or self.too_few.forbids(-kept, version):
            return None
        return self._decision("places", found, at_work, places=kept)

    def _note_failed(self, trial: Trial, version: int) -> None:
        if self.max_staleness > trial.before:
            self.too_high.note(trial.before + 1, version, hoped=trial.expected)
        else:
            self.too_low.note(-self.max_staleness, version, hoped=trial.expected)

    def _decision(self, action: Action, found: Means, reason: str, **changed: int) -> Decision:
        same = {"max_staleness": self.max_staleness, "places": self.places}
        return Decision(action=action, reason=reason, measured=asdict(found), **{**same, **changed})
