"""The trainer's decisions about staleness and rollbacks, as stored: one small file each, written once.

decisions/<n>.json      {"crc": …, "action": "raise", "policy_version": 40, "max_staleness": 3, "reason": "…", …}
"""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store
from storage.streams.sealed import unseal

ROLL_BACK = "roll_back"
"""The action of a rollback; the others are those of `millrace.control.rule`."""
RATE_FACTOR = "rate_factor"
"""In `measured` of a rollback: what the learning rate is multiplied by from then on."""
_LATEST = 30
"""Of a status."""
_CHANGES = {
    "raise": "bound raised to {max_staleness}",
    "lower": "bound lowered to {max_staleness}",
    "back": "bound back to {max_staleness}",
    "floor": "bound lowered to its minimum, {max_staleness}",
    "places": "places per generator set to {places}",
    ROLL_BACK: "rolled back to version {policy_version}, learning rate × {rate_factor:.3g}",
}
"""By action."""


@dataclass(frozen=True, kw_only=True)
class StoredDecision:
    """A decision of the trainer."""

    t: float
    """Unix seconds."""
    incarnation: int
    """Of the trainer that decided."""
    policy_version: int
    """The version that it had made. For a rollback: the one that it goes back to, or to an earlier checkpoint."""
    action: str
    """What it does."""
    max_staleness: int
    """Staleness bound that it leads to, policy versions."""
    places: int
    """Requests that each generator may have in flight."""
    reason: str
    """One sentence, with the numbers."""
    measured: dict[str, float] = field(default_factory=dict)
    """What the reason rests on, by name."""

    @property
    def change(self) -> str:
        """What it does, in a few words."""
        return _CHANGES.get(self.action, self.action).format_map({**asdict(self), **self.measured})


def product_of_factors(rollbacks: Iterable[StoredDecision]) -> float:
    """What these rollbacks together multiply the learning rate by."""
    return prod(decision.measured[RATE_FACTOR] for decision in rollbacks)


class DecisionsReader:
    """Reads a run's decisions repeatedly, for people; each `read` gets only new ones from the store."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._decisions: list[StoredDecision] = []
        self._next = 0

    def read(self) -> list[StoredDecision]:
        """All so far, in their order. A damaged one is left out; `millrace fsck` names it."""
        while True:
            try:
                decision = _read(self._store, layout.decision(self._next))
            except StreamCorrupt:
                self._next += 1
                continue
            if decision is None:
                return self._decisions
            self._decisions.append(decision)
            self._next += 1


def decisions_in_short(decisions: Sequence[StoredDecision]) -> dict[str, Any]:
    """As a status has them: how many there are, and the latest, oldest first, each with its `change`. Plain JSON."""
    latest = [{**asdict(decision), "change": decision.change} for decision in decisions[-_LATEST:]]
    return {"count": len(decisions), "latest": latest}


def read_decisions(store: Store) -> list[StoredDecision]:
    """All decisions, in their order. Raises StreamCorrupt for one that can't be read."""
    decisions: list[StoredDecision] = []
    while (decision := _read(store, layout.decision(len(decisions)))) is not None:
        decisions.append(decision)
    return decisions


def parse_decision(data: bytes, path: str) -> StoredDecision:
    """The decision in the file `path` with the content `data`. Raises StreamCorrupt."""
    try:
        return StoredDecision(**unseal(data))
    except (ValueError, TypeError) as error:
        reason = f"it is no decision of a trainer ({error}); restore it from a copy of the run"
        raise StreamCorrupt(path, reason) from error


def _read(store: Store, path: str) -> StoredDecision | None:
    try:
        return parse_decision(bytes(store.get(path)), path)
    except NotInStore:
        return None
