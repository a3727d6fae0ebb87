"""The trainer's decisions about staleness and rollbacks, as stored: one small file each, written once.

decisions/<n>.json      {"crc": …, "action": "raise", "policy_version": 40, "max_staleness": 3, "reason": "…", …}
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from math import prod
from typing import Any

from storage import layout
from storage.errors import Fenced, NotInStore, StreamCorrupt
from storage.json_text import RESTORE, parse_as
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal

ROLL_BACK = "roll_back"
"""The action of a rollback; the others are those of `millrace.control.rule`."""
RATE_FACTOR = "rate_factor"
"""Key in `measured` of a rollback: the factor of the learning rate from then on."""
_MAX_SHOWN = 30
_CHANGES = {
    "raise": "bound raised to {max_staleness}",
    "lower": "bound lowered to {max_staleness}",
    "back": "bound back to {max_staleness}",
    ROLL_BACK: "rolled back to version {policy_version}, learning rate × {rate_factor:.3g}",
}
"""The change that an action makes, for people."""


@dataclass(frozen=True, kw_only=True)
class StoredDecision:
    """A decision of the trainer."""

    t: float
    """Unix seconds."""
    incarnation: int
    """Incarnation of the trainer that decided."""
    policy_version: int
    """The version that it had made. For a rollback: the one that it goes back to, or to an earlier checkpoint."""
    action: str
    max_staleness: int
    """New staleness bound, policy versions."""

    reason: str
    """One sentence, with the numbers."""
    measured: dict[str, float] = field(default_factory=dict)
    """Measurements behind the reason, by name."""

    @property
    def change(self) -> str:
        """Describes its effect in a few words."""
        return _CHANGES.get(self.action, self.action).format_map({**asdict(self), **self.measured})


class Decisions:
    """The decisions of a run, for the one trainer that adds to them. Opening reads them; raises StreamCorrupt.

    A decision that a trainer made after the checkpoint from which its successor starts belongs to versions that no
    longer exist; it stays as a record of the time.
    """

    def __init__(self, store: Store) -> None:
        self._store = store
        self.all = read_decisions(store)

    def add(self, decision: StoredDecision) -> None:
        """Stores a decision, durably. Raises Fenced if another trainer decided since this one was opened."""
        path = layout.decision(len(self.all))
        if not self._store.put_if_absent(path, seal(asdict(decision))):
            raise Fenced(f"{path} was written by another trainer of the run")
        self.all.append(decision)


def read_decisions(store: Store) -> list[StoredDecision]:
    """All decisions, in their order. Raises StreamCorrupt for one that can't be read."""
    decisions: list[StoredDecision] = []
    while True:
        path = layout.decision(len(decisions))
        try:
            decisions.append(parse_decision(bytes(store.get(path)), path))
        except NotInStore:
            return decisions


def parse_decision(data: bytes, path: str) -> StoredDecision:
    """The decision in the file `path`. Raises StreamCorrupt."""
    try:
        values = unseal(data)
    except ValueError as error:
        raise StreamCorrupt(path, f"it is {error}; {RESTORE}") from error
    return parse_as(StoredDecision, values, path)


def summarize_decisions(decisions: Sequence[StoredDecision]) -> dict[str, Any]:
    """Their number, and the latest ones, oldest first, each with its `change`. Plain JSON, for a status."""
    latest = [{**asdict(decision), "change": decision.change} for decision in decisions[-_MAX_SHOWN:]]
    return {"count": len(decisions), "latest": latest}


def rolled_back(decisions: Sequence[StoredDecision], incarnation: int, policy_version: int) -> bool:
    """Whether a rollback discarded the `policy_version` that the trainer `incarnation` made."""
    return any(
        decision.action == ROLL_BACK
        and incarnation <= decision.incarnation
        and policy_version > decision.policy_version
        for decision in decisions
    )


def rate_factor(decisions: Sequence[StoredDecision], incarnation: int) -> float:
    """Factor of the learning rate of the trainer `incarnation`: those of the rollbacks before it, multiplied."""
    rollbacks = (made for made in decisions if made.action == ROLL_BACK and made.incarnation < incarnation)
    return prod(decision.measured[RATE_FACTOR] for decision in rollbacks)
