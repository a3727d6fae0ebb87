"""The decisions of a run, for the trainer that adds to them and for what follows from them.

Only the trainer decides. A decision that a trainer made after the checkpoint from which its successor starts belongs to
versions that no longer exist; it stays, as what was thought at the time.
"""

from dataclasses import asdict

from millrace.runs.decisions import ROLL_BACK, StoredDecision, product_of_factors, read_decisions
from storage import layout
from storage.errors import Fenced
from storage.stores.base import Store
from storage.streams.sealed import seal


class Decisions:
    """The decisions of a run, for the one trainer that adds to them. Opening reads them; raises StreamCorrupt."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.all = read_decisions(store)

    def add(self, decision: StoredDecision) -> None:
        """Stores a decision, durably. Raises Fenced if another trainer decided since this one was opened."""
        path = layout.decision(len(self.all))
        if not self._store.put_if_absent(path, seal(asdict(decision))):
            raise Fenced(f"{path} was written by another trainer of the run")
        self.all.append(decision)


def rolled_back(decisions: list[StoredDecision], incarnation: int, policy_version: int) -> bool:
    """Whether a rollback gave up what the trainer `incarnation` made of `policy_version`."""
    return any(
        one.action == ROLL_BACK and incarnation <= one.incarnation and policy_version > one.policy_version
        for one in decisions
    )


def rate_factor(decisions: list[StoredDecision], incarnation: int) -> float:
    """Factor of the learning rate of the trainer `incarnation`: those of the rollbacks before it, multiplied."""
    return product_of_factors(one for one in decisions if one.action == ROLL_BACK and one.incarnation < incarnation)
