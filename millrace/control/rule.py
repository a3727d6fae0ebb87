"""Which staleness bound and how many places the next versions get: a pure rule over what the steps measured.

    every bound + 2 steps, on their means; the first line that holds decides
    ESS below its target                                        bound halved
    trainer waits, and generators are busy                      places × 1.25
    trainer waits, and generators wait for room                 bound raised, unless the ESS would fall below its target
    long responses lose tokens to the bound                     bound raised, unless the ESS …
    ESS lacks over half of what it may lack, trainer never waits,
        and a whole step of groups lies ready                   bound − 1
        and generators wait for room                            places as many as they keep busy, and a quarter more
    any three steps in a row: ESS below its floor               bound to its minimum

A raise doubles the bound until it was lowered for the first time, and adds one from then on: slow start and additive
increase with multiplicative decrease, as TCP has them. Room that the generators do not need now is kept as long as the
ESS allows: AIPO learns as well from policies four versions old as from the newest (docs/staleness-study.md), and with
less room the trainer waits as soon as a stage slows down. A decision waits until the one before it can be seen: a group
admitted under it is trained `bound` steps later. A bound at which the trainer had to wait, or at which the ESS was too
low, is not tried again for a number of steps that doubles each time, and nor are places that were too few, so that both
come to rest.
"""

from dataclasses import asdict, dataclass, field
from math import ceil
from typing import Any, Literal

_WAITS, _NEVER_WAITS = 0.05, 0.01
"""Shares of a step's time: above the first the trainer waits, below the second it never does."""
_IDLE, _MOSTLY_BUSY = 0.05, 0.2
"""Shares of the generators' time without work: above the first they lack room, below the second places are not cut."""
_CUT, _WHOLE = 0.97, 0.98
"""Length ratios: below the first long responses lose tokens; the bound is not lowered below the second."""
_SCARCE = 0.5
"""Share of what the ESS may lack, above which the bound and the places are lowered for fresher data."""
_FLOOR_STEPS = 3
_PATIENCE, _MOST_PATIENCE = 32, 1024
"""Steps until a bound that did not serve is tried again: the first time, and at most."""

Action = Literal["raise", "lower", "halve", "floor", "places"]


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


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one step measured. Seconds are sums since the trainer started."""

    effective_sample_size: float
    """Of the ratios π/μ, before any clipping, as a share of its value on policy."""
    length_ratio: float
    """Mean length of what was trained ÷ of what was taken."""
    steps_ready: float
    """Scored groups that the step left behind, in steps' worth."""
    trainer_waited: float
    trainer_seconds: float
    generators_waited: float
    """Summed over all generators."""
    generators_seconds: float


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
class _Avoided:
    """A bound, or a number of places, that did not serve; neither it nor any beyond it is tried until some version."""

    value: int | None = None
    until: int = 0
    patience: int = _PATIENCE

    def note(self, value: int, version: int, *, again: bool) -> None:
        """`again`: whether it is among those avoided so far, and was tried once more."""
        if version >= self.until:
            self.patience = min(_MOST_PATIENCE, 2 * self.patience) if again else _PATIENCE
        self.value, self.until = value, version + self.patience

    def forbids_lowering_to(self, value: int, version: int) -> bool:
        """Whether `value` is one of those below which, and at which, too little was."""
        return self.value is not None and value <= self.value and version < self.until


@dataclass(kw_only=True)
class Rule:
    """The rule above, with the bound and the places that it has chosen."""

    limits: Limits
    max_staleness: int
    places: int
    too_low: _Avoided = field(default_factory=_Avoided)
    """The highest bound at which the trainer had to wait."""
    too_high: _Avoided = field(default_factory=_Avoided)
    """The lowest bound at which the ESS was below its target."""
    too_few: _Avoided = field(default_factory=_Avoided)
    """The most places with which the trainer had to wait though generators were busy."""
    slow_start: bool = True
    """Whether a raise still doubles the bound."""

    def __post_init__(self) -> None:
        self._readings: list[Reading] = []
        self._before: Reading | None = None
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
            "slow_start": self.slow_start,
        }

    @classmethod
    def from_json(cls, values: dict[str, Any], limits: Limits) -> "Rule":
        """The inverse of `to_json`, within `limits`, which may have changed since."""
        return cls(
            limits=limits,
            max_staleness=min(max(values["max_staleness"], limits.min_staleness), limits.max_staleness),
            places=min(max(values["places"], limits.group_size), limits.max_places),
            too_low=_Avoided(**values["too_low"]),
            too_high=_Avoided(**values["too_high"]),
            too_few=_Avoided(**values["too_few"]),
            slow_start=values["slow_start"],
        )

    def step(self, reading: Reading, version: int) -> Decision | None:
        """Takes the reading of the step that made `version`; what changes from then on, if anything."""
        self._readings.append(reading)
        low = reading.effective_sample_size < self.limits.ess_floor
        self._below_floor = self._below_floor + 1 if low else 0
        if self._below_floor >= _FLOOR_STEPS and self.max_staleness > self.limits.min_staleness:
            return self._decide(version, self._floor)
        if len(self._readings) < self.max_staleness + 2:
            return None
        return self._decide(version, self._by_means)

    def _decide(self, version: int, choose: Any) -> Decision | None:
        means = self._means()
        self._before, self._readings, self._below_floor = self._readings[-1], [], 0
        decision: Decision | None = choose(means, version)
        if decision is not None:
            self.slow_start = self.slow_start and decision.max_staleness >= self.max_staleness
            self.max_staleness, self.places = decision.max_staleness, decision.places
        return decision

    def _means(self) -> "_Means":
        # The first window of a trainer begins with its first step.
        first, last = self._before or self._readings[0], self._readings[-1]
        count = len(self._readings)
        waited, seconds, idle, generating = (
            getattr(last, name) - getattr(first, name)
            for name in ("trainer_waited", "trainer_seconds", "generators_waited", "generators_seconds")
        )
        return _Means(
            effective_sample_size=sum(one.effective_sample_size for one in self._readings) / count,
            length_ratio=last.length_ratio,
            steps_ready=sum(one.steps_ready for one in self._readings) / count,
            trainer_waits=waited / seconds if seconds > 0 else 0.0,
            generators_wait=idle / generating if generating > 0 else 0.0,
        )

    def _note_too_low(self, version: int) -> None:
        avoided = self.too_low.value
        self.too_low.note(self.max_staleness, version, again=avoided is not None and self.max_staleness <= avoided)

    def _note_too_high(self, version: int) -> None:
        avoided = self.too_high.value
        self.too_high.note(self.max_staleness, version, again=avoided is not None and self.max_staleness >= avoided)

    def _note_too_few(self, version: int) -> None:
        avoided = self.too_few.value
        self.too_few.note(self.places, version, again=avoided is not None and self.places <= avoided)

    def _floor(self, means: "_Means", version: int) -> Decision:
        self._note_too_high(version)
        return self._change(
            "floor",
            means,
            f"the effective sample size was below the floor of {self.limits.ess_floor:g} in {_FLOOR_STEPS} steps in a "
            "row; nothing is admitted until the bound is down",
            max_staleness=self.limits.min_staleness,
        )

    def _by_means(self, means: "_Means", version: int) -> Decision | None:
        limits, bound = self.limits, self.max_staleness
        ess = f"effective sample size {means.effective_sample_size:.3f}"
        if means.effective_sample_size < limits.ess_target and bound > limits.min_staleness:
            self._note_too_high(version)
            return self._change(
                "halve",
                means,
                f"{ess} is below the target of {limits.ess_target:g}",
                max_staleness=max(limits.min_staleness, bound // 2),
            )
        waits, idle = means.trainer_waits > _WAITS, means.generators_wait > _IDLE
        at_work = f"the trainer waits {means.trainer_waits:.0%} of its time, generators {means.generators_wait:.0%}"
        if waits and not idle and self.places < limits.max_places:
            self._note_too_few(version)
            places = min(limits.max_places, ceil(1.25 * self.places))
            return self._change("places", means, at_work, places=places)
        cut = means.length_ratio < _CUT
        raised = self._raised(means, version)
        if ((waits and idle) or cut) and raised > bound:
            self._note_too_low(version)
            why = at_work if waits and idle else f"trained responses have {means.length_ratio:.3f} of the length taken"
            return self._change("raise", means, f"{why}, and {ess}", max_staleness=raised)
        scarce = 1 - means.effective_sample_size > _SCARCE * (1 - limits.ess_target)
        if means.trainer_waits >= _NEVER_WAITS or not scarce:
            return None
        if means.steps_ready >= 1 and means.length_ratio >= _WHOLE and self._may_fall(version):
            reason = f"the trainer never waits, and groups for {means.steps_ready:.1f} steps lie ready"
            return self._change("lower", means, reason, max_staleness=bound - 1)
        kept = max(limits.group_size, ceil(1.25 * self.places * (1 - means.generators_wait)))
        few = self.too_few.forbids_lowering_to(kept, version)
        if means.generators_wait > _MOSTLY_BUSY and kept <= 0.8 * self.places and not few:
            return self._change("places", means, at_work, places=kept)
        return None

    def _raised(self, means: "_Means", version: int) -> int:
        """The next bound up, as far as nothing speaks against it; the bound itself if everything does."""
        bound = self.max_staleness
        wanted = min(self.limits.max_staleness, 2 * bound if self.slow_start and bound > 0 else bound + 1)
        avoided = self.too_high.value
        if avoided is not None and version < self.too_high.until:
            wanted = min(wanted, avoided - 1)
        # χ², and with it what an ESS lacks, grows with the square of the distance between two policies.
        lacking, most = 1 - means.effective_sample_size, 1 - self.limits.ess_target
        while wanted > bound and lacking * (wanted / max(1, bound)) ** 2 > most:
            wanted -= 1
        return max(bound, wanted)

    def _may_fall(self, version: int) -> bool:
        below = self.max_staleness - 1
        # At 0 nothing overlaps, so the trainer always waits: only too low an ESS makes that worth while.
        if below < max(1, self.limits.min_staleness):
            return False
        return not self.too_low.forbids_lowering_to(below, version)

    def _change(self, action: Action, means: "_Means", reason: str, **changed: int) -> Decision:
        same = {"max_staleness": self.max_staleness, "places": self.places}
        return Decision(action=action, reason=reason, measured=asdict(means), **{**same, **changed})


@dataclass(frozen=True, kw_only=True)
class _Means:
    """Over the steps since the decision before."""

    effective_sample_size: float
    length_ratio: float
    steps_ready: float
    trainer_waits: float
    """Share of its time."""
    generators_wait: float
    """Share of their time, for room or weights."""
