"""Which staleness bound and how many places the next versions get: a pure rule over what the steps measured.

    after each change: as many steps as its bound, which still train what was admitted before;
    then windows of bound + 2 to bound + 8 steps, of whose means the first line that holds decides
    ESS below its target                               bound down to where the ESS is expected at its target
    the last raise did not gain what it was made for   bound back
    trainer waits, and generators are busy             places × 1.25
    trainer waits, and generators wait for room        bound up to as many steps on their way as keep both busy
    long responses lose tokens to the bound            bound doubled
    trainer never waits, groups of whole steps lie
        ready all the time, and fresher ones teach more     bound down by these steps
        and generators wait for room                        places as many as they keep busy, and a quarter more
    any three steps in a row: ESS below its floor      bound to its minimum

How far up is Little's law: bound + 1 steps are on their way, and as many more are needed as the time that both sides
wait is of the time that they work. How far down is what lies ready even when least does, as CoDel judges a queue
(Nichols and Jacobson, 2012). Each takes one window, so a stage that slows down is answered at once.

A raise is a trial, because stages that share cores gain nothing from waiting less. It stays if the steps per second,
each counted by its ESS, rise by 5 % or a third of what was hoped for. Else the bound goes back, and is left alone for a number
of steps that doubles each time, unless there is much more to win by then. The same holds for a bound at which the
trainer had to wait, or at which the ESS was too low, and for places that were too few: so all of them come to rest.
"""

from dataclasses import asdict, dataclass, field
from math import ceil, isqrt
from typing import Any, Literal

from configs.learning.staleness import StalenessConfig
from millrace.control.avoided import Avoided
from millrace.control.measured import Means, Reading, means

_WAITS, _NEVER_WAITS = 0.05, 0.01
"""Shares of a step's time: above the first the trainer waits, below the second it never does."""
_IDLE, _MOSTLY_BUSY = 0.05, 0.2
"""Shares of the generators' time without work: above the first they lack room, below the second places are not cut."""
_MOST_WAITS = 0.95
"""A larger share of waiting says no more than that the bound is far too low."""
_CUT, _WHOLE = 0.97, 0.98
"""Length ratios: below the first long responses lose tokens; the bound is not lowered below the second."""
_TEACHES = 0.01
"""What an ESS has to lack for fresher groups to teach more."""
_SERVED, _PLENTY = 1 / 3, 0.05
"""Share of what was hoped for that a raise has to gain; and the gain that is enough in any case."""
_FLOOR_STEPS = 3
_SHORT, _LONG = 2, 8
"""Steps of a window beyond the bound: where there is much to win, and where noise could hide it."""
_MUCH = 0.25
"""Share of a step's time."""

Action = Literal["raise", "back", "lower", "floor", "places"]


@dataclass(frozen=True, kw_only=True)
class Limits:
    """What the rule may choose from, and what it aims at."""

    min_staleness: int
    max_staleness: int
    group_size: int
    """Fewest places of a generator."""
    max_places: int
    ess_target: float
    ess_floor: float

    @classmethod
    def of(cls, staleness: StalenessConfig, *, group_size: int, max_places: int) -> "Limits":
        """Those of a config."""
        return cls(
            min_staleness=staleness.min_staleness,
            max_staleness=staleness.max_staleness,
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
class Trial:
    """A raise that has yet to gain something."""

    before: int
    """The bound before it."""
    gain: float
    """As in `Means`, before it."""
    length_ratio: float
    hoped: float
    """The share of a step's time that waiting took, or 0 if it was made for the length of responses."""


@dataclass(kw_only=True)
class Rule:
    """The rule above, with the bound and the places that it has chosen."""

    limits: Limits
    max_staleness: int
    places: int
    too_low: Avoided = field(default_factory=Avoided)
    """The highest bound at which the trainer had to wait."""
    too_high: Avoided = field(default_factory=Avoided)
    """The lowest bound that gained nothing, or at which the ESS was below its target."""
    too_few: Avoided = field(default_factory=Avoided)
    """The most places with which the trainer had to wait though generators were busy."""
    trial: Trial | None = None

    def __post_init__(self) -> None:
        self._readings: list[Reading] = []
        self._before: Reading | None = None
        self._settling = max(1, self.max_staleness)
        self._below_floor = 0

    @classmethod
    def start(cls, limits: Limits) -> "Rule":
        """The rule at the beginning of a run: the lowest bound, all places."""
        return cls(limits=limits, max_staleness=limits.min_staleness, places=limits.max_places)

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
            trial=None if trial is None else Trial(**trial),
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
        extra = _SHORT if scarce or found.both_wait > _MUCH else _LONG
        if len(self._readings) < self.max_staleness + extra:
            return None
        self._begin_window()
        return self._change(self._by_means(found, version))

    def _begin_window(self) -> None:
        self._before, self._readings = self._readings[-1], []

    def _change(self, decision: Decision | None) -> Decision | None:
        if decision is not None:
            # What was admitted under the old bound is trained before what is admitted under the new one.
            self._settling = max(decision.max_staleness, self.max_staleness)
            self.max_staleness, self.places = decision.max_staleness, decision.places
            self._below_floor = 0
        return decision

    def _floor(self, found: Means, version: int) -> Decision:
        self._note_too_high(version, self.max_staleness)
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
            self._note_too_high(version, bound)
            ess, target = found.effective_sample_size, limits.ess_target
            reason = f"effective sample size {ess:.3f} is below the target of {target:g}"
            return self._decision("lower", found, reason, max_staleness=self._affordable(found, bound - 1))
        if trial is not None and (failed := _failed(trial, found)):
            self._note_too_high(version, trial.before + 1, trial.hoped or 1 - trial.length_ratio)
            return self._decision("back", found, failed, max_staleness=max(limits.min_staleness, trial.before))
        waits, idle = found.trainer_waits > _WAITS, found.generators_wait > _IDLE
        at_work = f"the trainer waits {found.trainer_waits:.0%} of its time, generators {found.generators_wait:.0%}"
        if waits and not idle and self.places < limits.max_places:
            again = self.too_few.value is not None and self.places <= self.too_few.value
            self.too_few.note(self.places, version, again=again)
            places = min(limits.max_places, ceil(1.25 * self.places))
            return self._decision("places", found, at_work, places=places)
        if waits and idle:
            # Little's law: bound + 1 steps are on their way, and take so long that both sides wait.
            busy = 1 - min(_MOST_WAITS, found.both_wait)
            return self._raise(found, version, ceil((bound + 1) / busy) - 1, at_work, hoped=found.both_wait)
        if found.length_ratio < _CUT:
            why = f"trained responses have {found.length_ratio:.3f} of the length taken"
            return self._raise(found, version, max(1, 2 * bound), why, hoped=0.0)
        if found.trainer_waits < _NEVER_WAITS and 1 - found.effective_sample_size > _TEACHES:
            return self._fresher(found, version, at_work)
        return None

    def _raise(self, found: Means, version: int, wanted: int, why: str, *, hoped: float) -> Decision | None:
        """The bound goes up to `wanted`, as far as nothing speaks against it."""
        bound = self.max_staleness
        wanted = self.too_high.highest_allowed(
            min(self.limits.max_staleness, wanted), version, hoped or 1 - found.length_ratio
        )
        wanted = self._affordable(found, wanted)
        if wanted <= bound:
            return None
        again = self.too_low.value is not None and bound <= self.too_low.value
        self.too_low.note(bound, version, again=again)
        self.trial = Trial(before=bound, gain=found.gain, length_ratio=found.length_ratio, hoped=hoped)
        reason = f"{why}, and effective sample size {found.effective_sample_size:.3f}"
        return self._decision("raise", found, reason, max_staleness=wanted)

    def _affordable(self, found: Means, wanted: int) -> int:
        """The highest bound up to `wanted` at which the ESS is expected to be at its target."""
        # χ², and with it what an ESS lacks, grows with the square of the distance between two policies.
        lacking, most = 1 - found.effective_sample_size, 1 - self.limits.ess_target
        bound = max(1, self.max_staleness)
        if lacking > 0:
            wanted = min(wanted, isqrt(int(bound * bound * most / lacking)))
        return max(self.limits.min_staleness, wanted)

    def _fresher(self, found: Means, version: int, at_work: str) -> Decision | None:
        """Less room, as far as nobody needs it."""
        limits, bound = self.limits, self.max_staleness
        # At 0 nothing overlaps, so the trainer always waits: only too low an ESS makes that worth while.
        lower = max(1, limits.min_staleness, bound - int(found.steps_ready))
        while lower < bound and self.too_low.forbids_lowering_to(lower, version):
            lower += 1
        if lower < bound and found.length_ratio >= _WHOLE:
            reason = f"the trainer never waits, and groups for {found.steps_ready:.1f} steps lie ready all the time"
            return self._decision("lower", found, reason, max_staleness=lower)
        kept = max(limits.group_size, ceil(1.25 * self.places * (1 - found.generators_wait)))
        few = self.too_few.forbids_lowering_to(kept, version)
        if found.generators_wait > _MOSTLY_BUSY and kept <= 0.8 * self.places and not few:
            return self._decision("places", found, at_work, places=kept)
        return None

    def _note_too_high(self, version: int, bound: int, hoped: float = 1.0) -> None:
        again = self.too_high.value is not None and bound >= self.too_high.value
        self.too_high.note(bound, version, again=again, hoped=hoped)

    def _decision(self, action: Action, found: Means, reason: str, **changed: int) -> Decision:
        same = {"max_staleness": self.max_staleness, "places": self.places}
        return Decision(action=action, reason=reason, measured=asdict(found), **{**same, **changed})


def _failed(trial: Trial, found: Means) -> str | None:
    """Why a raise did not serve, if it did not."""
    if trial.hoped:
        if found.gain >= trial.gain * (1 + min(_PLENTY, _SERVED * trial.hoped)):
            return None
        return (
            f"the bound of before gave {trial.gain:.3g} steps per second, counted by their effective sample size, and "
            f"this one {found.gain:.3g}"
        )
    won, lacked = found.length_ratio - trial.length_ratio, 1 - trial.length_ratio
    if found.length_ratio >= _CUT or won >= _SERVED * lacked:
        return None
    return (
        f"trained responses had {trial.length_ratio:.3f} of the length taken under the bound of before, and have "
        f"{found.length_ratio:.3f} under this one"
    )
