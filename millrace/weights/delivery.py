"""Which generator holds which version, as far as it has acknowledged: who is late, who is back, what has arrived.

    push v ──► generator owes v ──acknowledges v or newer──► owes nothing
                    │ deadline passes                             ▲
                    ▼                                             │ acknowledges anything newer than before
               late: named once, served through the store ────────┘

An acknowledgement is a generator's sign of life: incarnation, policy version, and the digest of what it loaded, which
must be that of what was pushed. There is no clock and no store here: whoever looks says what is to be seen, and when.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from millrace.weights.base import WeightsId

Life = Mapping[str, Any]
"""A generator's sign of life, empty if there is none. Looked at: `incarnation`, `policy_version`, `weights_digest`,
`t_updated`, `t_main`, `t_ready`, `pause_seconds`, `weights_route`."""

_Version = tuple[int, int]
"""Incarnation, policy version."""
_NOTHING: _Version = (-1, -1)
_DIGESTS_KEPT = 64
"""Of so many pushes the digest is known; whoever acknowledges an older one is not checked."""


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A push that is where it should be: with every generator that is not late."""

    push_seconds: float
    """From the hand-over until the slowest of them worked with it."""
    generator_pause_seconds_max: float
    """The longest that one of them generated nothing for it."""
    fallbacks: int
    """How many generators were late, and served through the store if there is one to fall back to."""


@dataclass(frozen=True, kw_only=True)
class News:
    """Something about one generator that people should know."""

    kind: Literal["lost", "rejoined", "alarm"]
    """Late for a version; back with a newer one; at work with other weights than it says."""
    generator: int
    sentence: str


@dataclass(frozen=True, kw_only=True)
class Seen:
    """What a look brought."""

    news: Sequence[News]
    arrival: Arrival | None
    """Once for each push that is not superseded before."""


class Deliveries:
    """The books of `num_generators` generators.

    `opened` is when this process began, unix seconds: nobody is late for the time before. `falls_back` says whether
    late generators are served through the store.
    """

    def __init__(self, num_generators: int, *, deadline_seconds: float, opened: float, falls_back: bool) -> None:
        self._accounts = [_Account(g, deadline_seconds, falls_back) for g in range(num_generators)]
        self._opened = opened
        self._newest: WeightsId | None = None
        self._digests: dict[_Version, str] = {}
        self._arrived = True

    @property
    def late(self) -> list[int]:
        """Generators that were named as late and have not acknowledged anything newer since; ascending."""
        return [g for g, account in enumerate(self._accounts) if account.late]

    @property
    def awaited(self) -> bool:
        """Whether somebody lacks the newest version, as far as has been seen."""
        return any(account.owes is not None for account in self._accounts)

    def push(self, weights_id: WeightsId, digest: str) -> None:
        """This version, newer than all before, is on its way; one that has not arrived yet need not any more."""
        self._newest = weights_id
        self._arrived = False
        self._digests[_version(weights_id)] = digest
        if len(self._digests) > _DIGESTS_KEPT:
            self._digests.pop(next(iter(self._digests)))
        for account in self._accounts:
            account.push(weights_id, since=max(weights_id.t_offered, self._opened))

    def look(self, lives: Sequence[Life], now: float) -> Seen:
        """What the generators' signs of life, in their order, say at `now` (unix seconds)."""
        news: list[News] = []
        if self._newest is not None:
            for account, life in zip(self._accounts, lives, strict=True):
                news += account.look(life, now, self._newest, self._digests)
        return Seen(news=news, arrival=self._arrival(lives))

    def _arrival(self, lives: Sequence[Life]) -> Arrival | None:
        there = [life for life, account in zip(lives, self._accounts, strict=True) if account.owes is None]
        if self._arrived or self._newest is None or not there or len(there) + len(self.late) < len(lives):
            return None
        self._arrived = True
        return Arrival(
            push_seconds=max(life["t_updated"] for life in there) - self._newest.t_offered,
            generator_pause_seconds_max=max(life.get("pause_seconds", 0.0) for life in there),
            fallbacks=len(self.late),
        )


@dataclass(kw_only=True)
class _Debt:
    """What a generator has not acknowledged."""

    policy_version: int
    """The first version of it."""
    since: float
    """When that was handed over, or the generator last acknowledged anything, if that was later; unix seconds."""


class _Account:
    """One generator, as far as it has been seen."""

    def __init__(self, generator: int, deadline_seconds: float, falls_back: bool) -> None:
        self.owes: _Debt | None = None
        self.late = False
        self._generator = generator
        self._name = f"generator {generator}"
        self._deadline = deadline_seconds
        self._others = (
            "it is served through the store and the others go on" if falls_back else "the others go on without it"
        )
        self._held = _NOTHING
        # The version and the wrong digest that were last spoken of.
        self._blamed: tuple[_Version, object] | None = None

    def push(self, weights_id: WeightsId, since: float) -> None:
        if self.owes is None:
            self.owes = _Debt(policy_version=weights_id.policy_version, since=since)

    def look(self, life: Life, now: float, newest: WeightsId, digests: Mapping[_Version, str]) -> list[News]:
        """News of this generator."""
        held = _acknowledged(life)
        if (alarm := self._wrong(held, life.get("weights_digest"), digests)) is not None:
            return alarm + self._look_for_lateness(life, now)
        before, self._held = self._held, held
        if held <= before:
            # Lower: started again, and its successor holds nothing, or what the store had.
            if held < before and self.owes is None:
                self.owes = _Debt(policy_version=newest.policy_version, since=now)
            return self._look_for_lateness(life, now)
        news: list[News] = []
        if self.late:
            assert self.owes is not None
            self.late = False
            route = f", by {life['weights_route']}" if "weights_route" in life else ""
            waited = now - self.owes.since
            news = [self._news("rejoined", f"{self._name} is back at version {held[1]} after {waited:.0f} s{route}")]
        there = held >= _version(newest)
        self.owes = None if there else _Debt(policy_version=newest.policy_version, since=now)
        return news

    def _wrong(self, held: _Version, digest: object, digests: Mapping[_Version, str]) -> list[News] | None:
        """None if the generator's digest is right as far as is known; else what there is to say of it."""
        expected = digests.get(held, digest)
        if digest == expected:
            return None
        blamed, self._blamed = self._blamed, (held, digest)
        if blamed == self._blamed:
            return []
        sentence = (
            f"ALARM: {self._name} works with other weights than version {held[1]}: their digest is {digest}, "
            f"that of what was pushed is {expected}"
        )
        return [self._news("alarm", sentence)]

    def _look_for_lateness(self, life: Life, now: float) -> list[News]:
        # One that is still loading its model says t_ready null; its time begins when it is ready.
        ready = life.get("t_ready", 0.0)
        if self.owes is None or self.late or ready is None or now - max(self.owes.since, ready) <= self._deadline:
            return []
        self.late = True
        waited = now - self.owes.since
        sentence = f"{self._name} has not taken version {self.owes.policy_version} after {waited:.0f} s: {self._others}"
        return [self._news("lost", sentence)]

    def _news(self, kind: Literal["lost", "rejoined", "alarm"], sentence: str) -> News:
        return News(kind=kind, generator=self._generator, sentence=sentence)


def _acknowledged(life: Life) -> _Version:
    # A process that has just started repeats what its predecessor said.
    if life.get("t_updated", 0.0) < life.get("t_main", 0.0):
        return _NOTHING
    return life.get("incarnation", -1), life.get("policy_version", -1)


def _version(weights_id: WeightsId) -> _Version:
    return weights_id.incarnation, weights_id.policy_version
