"""Tracks which generator has acknowledged which version, which are late, and which have returned.

    push v ──► pending ──acknowledges v or newer──► nothing pending
                  │ deadline passes                        ▲
                  ▼                                        │ acknowledges anything newer than before
             late: reported once, served by the store ─────┘

An acknowledgement is a generator's status record: incarnation, policy version, and the digest of the loaded weights,
which must match the pushed ones. This module has neither clock nor store: callers pass in the records and the time.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.weights.base import WeightsId

Status = Mapping[str, Any]
"""A generator's status record, empty before the first. Fields read: `incarnation`, `policy_version`, `weights_digest`,
`t_updated`, `process`, `acknowledged_by`, `t_ready`, `pause_seconds`, `weights_route`."""

Event = Literal["generator.lost", "generator.rejoined"]

_Version = tuple[int, int]
"""Incarnation, policy version."""
_NOTHING: _Version = (-1, -1)
_DIGESTS_KEPT = 64
"""The digests of this many pushes are kept; acknowledgements of older ones are not checked."""


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

    event: Event | None
    """Late for a version, or back with a newer one. None for an alarm: it uses other weights than its version's."""
    generator: int
    sentence: str


class AckTracker:
    """Tracks the acknowledgements of `num_generators` generators.

    `opened` is when this process started, unix seconds; deadlines don't start earlier. `falls_back`: whether late
    generators are served by the store.
    """

    def __init__(self, num_generators: int, *, deadline_seconds: float, opened: float, falls_back: bool) -> None:
        self._generators = [_Generator(g, deadline_seconds, falls_back) for g in range(num_generators)]
        self._opened = opened
        self._newest: WeightsId | None = None
        self._digests: dict[_Version, str] = {}
        self._arrived = True

    @property
    def late(self) -> list[int]:
        """Generators that were reported late and have not acknowledged anything newer since; ascending."""
        return [generator.number for generator in self._generators if generator.late]

    @property
    def awaited(self) -> bool:
        """Whether any generator has yet to acknowledge the newest version."""
        return any(generator.pending is not None for generator in self._generators)

    def push(self, weights_id: WeightsId, digest: str) -> None:
        """Expects acknowledgements of this version. It is newer than all others, and supersedes those in transit."""
        self._newest = weights_id
        self._arrived = False
        self._digests[_version(weights_id)] = digest
        if len(self._digests) > _DIGESTS_KEPT:
            self._digests.pop(next(iter(self._digests)))
        for generator in self._generators:
            generator.push(weights_id, since=max(weights_id.t_offered, self._opened))

    def look(self, statuses: Sequence[Status], now: float) -> tuple[list[Notification], Arrival | None]:
        """Evaluates the generators' status records, in their order, at `now` (unix seconds).

        Returns new notifications, and the arrival of the newest push once it is complete.
        """
        notifications: list[Notification] = []
        if self._newest is not None:
            for generator, status in zip(self._generators, statuses, strict=True):
                notifications += generator.look(status, now, self._newest, self._digests)
        return notifications, self._arrival(statuses)

    def _arrival(self, statuses: Sequence[Status]) -> Arrival | None:
        arrived = [status for status, g in zip(statuses, self._generators, strict=True) if g.pending is None]
        if self._arrived or self._newest is None or not arrived or len(arrived) + len(self.late) < len(statuses):
            return None
        self._arrived = True
        return Arrival(
            push_seconds=max(status["t_updated"] for status in arrived) - self._newest.t_offered,
            generator_pause_seconds_max=max(status.get("pause_seconds", 0.0) for status in arrived),
            fallbacks=len(self.late),
        )


class _Generator:
    """One generator, as far as its status records show."""

    def __init__(self, number: int, deadline_seconds: float, falls_back: bool) -> None:
        self.number = number
        self.pending: int | None = None
        """The oldest version that it has not acknowledged."""
        self.late = False
        self._deadline = deadline_seconds
        self._falls_back = falls_back
        self._held = _NOTHING
        # Time of the pending version's handover, or of the last acknowledgement if later; unix seconds.
        self._since = 0.0
        # The version and the wrong digest of the last alarm.
        self._alarmed: tuple[_Version, object] | None = None

    def push(self, weights_id: WeightsId, since: float) -> None:
        """Expects an acknowledgement, unless one is pending already."""
        if self.pending is None:
            self.pending, self._since = weights_id.policy_version, since

    def look(
        self, status: Status, now: float, newest: WeightsId, digests: Mapping[_Version, str]
    ) -> Iterator[Notification]:
        held, digest = _acknowledged(status), status.get("weights_digest")
        expected = digests.get(held)
        if expected is not None and digest != expected:
            alarmed, self._alarmed = self._alarmed, (held, digest)
            if alarmed != self._alarmed:
                yield self._notification(
                    None,
                    f"ALARM: generator {self.number} uses other weights than version {held[1]}: their digest is "
                    f"{digest}, the pushed version's is {expected}",
                )
            yield from self._check_deadline(status, now)
            return
        last_held, self._held = self._held, held
        if held <= last_held:
            # Lower: the generator was restarted, and holds nothing or the store's version.
            if held < last_held:
                self.push(newest, since=now)
            yield from self._check_deadline(status, now)
            return
        if self.late:
            self.late = False
            route = f", by {status['weights_route']}" if "weights_route" in status else ""
            sentence = f"generator {self.number} is back at version {held[1]} after {now - self._since:.0f} s{route}"
            yield self._notification("generator.rejoined", sentence)
        self.pending = None
        if held < _version(newest):
            self.push(newest, since=now)

    def _check_deadline(self, status: Status, now: float) -> Iterator[Notification]:
        # While a generator loads its model, t_ready is null; its deadline starts when it is ready.
        ready = status.get("t_ready", 0.0)
        if self.pending is None or self.late or ready is None or now - max(self._since, ready) <= self._deadline:
            return
        self.late = True
        fallback = "it is served by the store, and the others continue"
        if not self._falls_back:
            fallback = "the others continue without it"
        yield self._notification(
            "generator.lost",
            f"generator {self.number} has no version {self.pending} after {now - self._since:.0f} s: {fallback}",
        )

    def _notification(self, event: Event | None, sentence: str) -> Notification:
        return Notification(event=event, generator=self.number, sentence=sentence)


def _acknowledged(status: Status) -> _Version:
    # A process that has just started repeats its predecessor's record. Times can't show that: a clock may be set back.
    if status.get("acknowledged_by") != status.get("process"):
        return _NOTHING
    return status.get("incarnation", -1), status.get("policy_version", -1)


def _version(weights_id: WeightsId) -> _Version:
    return weights_id.incarnation, weights_id.policy_version
