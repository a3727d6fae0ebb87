"""Tracks which generator has acknowledged which version, which are late, and which have returned.

    push v ──► pending ──acknowledges v or newer──► nothing pending
                  │ deadline passes                        ▲
                  ▼                                        │ acknowledges anything newer than before
             late: reported once, served by the store ─────┘

An acknowledgement is a generator's status record: incarnation, policy version, and the digest of the loaded weights,
which must match the pushed ones. This module has neither clock nor store: callers pass in the records and the time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.weights.base import WeightsId

Status = Mapping[str, Any]
"""A generator's status record, empty before the first. Fields read: `incarnation`, `policy_version`, `weights_digest`,
`t_updated`, `process`, `acknowledged_by`, `t_ready`, `pause_seconds`, `weights_route`."""

_NOTHING = (-1, -1)
"""An incarnation and a policy version below all others."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A push that every generator has acknowledged, except late ones."""

    push_seconds: float
    """Time from the handover until the slowest of them used the version."""
    generator_pause_seconds_max: float
    """The longest pause in generation that it caused."""
    fallbacks: int
    """Number of late generators. They are served by the store, if the transport has that fallback."""


@dataclass(frozen=True, kw_only=True)
class Notification:
    """News about one generator, for the log and for events."""

    event: Literal["generator.lost", "generator.rejoined"] | None
    """Late for a version, or back with a newer one. None for an alarm: it uses other weights than its version's."""
    generator: int
    sentence: str


@dataclass(kw_only=True)
class _Generator:
    """One generator, as far as its status records show."""

    held: tuple[int, int] = _NOTHING
    pending: int | None = None
    """The oldest version that it has not acknowledged."""
    since: float = 0.0
    """Time of the pending version's handover, or of the last acknowledgement if later; unix seconds."""
    late: bool = False
    alarmed: bool = False
    """Whether the digest of the newest version was reported as wrong."""


class AckTracker:
    """Tracks the acknowledgements of `num_generators` generators.

    `opened` is when this process started, unix seconds; deadlines don't start earlier. `falls_back`: whether late
    generators are served by the store.
    """

    def __init__(self, num_generators: int, *, deadline_seconds: float, opened: float, falls_back: bool) -> None:
        self._generators = [_Generator() for _ in range(num_generators)]
        self._deadline = deadline_seconds
        self._opened = opened
        self._falls_back = falls_back
        self._newest: WeightsId | None = None
        self._digest = ""
        self._arrived = True

    @property
    def late(self) -> list[int]:
        """Generators that were reported late and have not acknowledged anything newer since; ascending."""
        return [number for number, generator in enumerate(self._generators) if generator.late]

    @property
    def awaited(self) -> bool:
        """Whether any generator has yet to acknowledge the newest version."""
        return any(generator.pending is not None for generator in self._generators)

    def push(self, weights_id: WeightsId, digest: str) -> None:
        """Expects acknowledgements of this version. It is newer than all others, and supersedes those in transit."""
        self._newest, self._digest, self._arrived = weights_id, digest, False
        for generator in self._generators:
            generator.alarmed = False
            if generator.pending is None:
                generator.pending = weights_id.policy_version
                generator.since = max(weights_id.t_offered, self._opened)

    def look(self, statuses: Sequence[Status], now: float) -> tuple[list[Notification], Arrival | None]:
        """Evaluates the generators' status records, in their order, at `now` (unix seconds).

        Returns new notifications, and the arrival of the newest push once it is complete.
        """
        if self._newest is None:
            return [], None
        checked = [self._check(number, status, now, self._newest) for number, status in enumerate(statuses)]
        notifications = [notification for notification in checked if notification is not None]
        return notifications, self._arrival(statuses, self._newest)

    def _arrival(self, statuses: Sequence[Status], pushed: WeightsId) -> Arrival | None:
        arrived = [status for status, g in zip(statuses, self._generators, strict=True) if g.pending is None]
        if self._arrived or not arrived or len(arrived) + len(self.late) < len(statuses):
            return None
        self._arrived = True
        return Arrival(
            push_seconds=max(status["t_updated"] for status in arrived) - pushed.t_offered,
            generator_pause_seconds_max=max(status.get("pause_seconds", 0.0) for status in arrived),
            fallbacks=len(self.late),
        )

    def _check(self, number: int, status: Status, now: float, pushed: WeightsId) -> Notification | None:
        generator = self._generators[number]
        newest = pushed.incarnation, pushed.policy_version
        held, held_before = _acknowledged(status), generator.held
        if held == newest and (digest := status.get("weights_digest")) != self._digest:
            if not generator.alarmed:
                generator.alarmed = True
                sentence = (
                    f"ALARM: generator {number} uses other weights than version {held[1]}: their digest is {digest}, "
                    f"the pushed version's is {self._digest}"
                )
                return Notification(event=None, generator=number, sentence=sentence)
            held = held_before
        generator.held = held
        if held > held_before:
            was_late, waited = generator.late, now - generator.since
            generator.late = False
            generator.pending, generator.since = None if held >= newest else newest[1], now
            if not was_late:
                return None
            route = f", by {status['weights_route']}" if "weights_route" in status else ""
            sentence = f"generator {number} is back at version {held[1]} after {waited:.0f} s{route}"
            return Notification(event="generator.rejoined", generator=number, sentence=sentence)
        if held < held_before and generator.pending is None:
            # The generator was restarted, and holds nothing or the store's version.
            generator.pending, generator.since = newest[1], now
        # While a generator loads its model, t_ready is null; its deadline starts when it is ready.
        ready = status.get("t_ready", 0.0)
        if generator.pending is None or generator.late or ready is None:
            return None
        if now - max(generator.since, ready) <= self._deadline:
            return None
        generator.late = True
        fallback = "it is served by the store, and the others continue"
        if not self._falls_back:
            fallback = "the others continue without it"
        sentence = (
            f"generator {number} has no version {generator.pending} after {now - generator.since:.0f} s: {fallback}"
        )
        return Notification(event="generator.lost", generator=number, sentence=sentence)


def _acknowledged(status: Status) -> tuple[int, int]:
    """The incarnation and policy version that this record acknowledges."""
    # A process that has just started repeats its predecessor's record. Times can't show that: a clock may be set back.
    if status.get("acknowledged_by") != status.get("process"):
        return _NOTHING
    return status.get("incarnation", -1), status.get("policy_version", -1)
