"""Rolls a run back to its last checkpoint that was good.

    collapse ─► newest checkpoint up to the last good version ─► decisions/<n>.json ─► this trainer ends
                                                                       │
    a new trainer ─► checkpoints that were given up are skipped ◄──────┘ ─► lineage, ledger, streams as after a kill
                  └► a lower learning rate

A trainer that merely started again would collapse again: in sync mode on the same rollouts. So the learning rate is cut
to a third, or to that of the good steps if that is less.
"""

import time

from millrace.control.collapse import Collapse
from millrace.errors import RolledBack, TrainingDiverged
from millrace.runs.decisions import RATE_FACTOR, ROLL_BACK, Decisions, StoredDecision
from storage import layout
from storage.checkpoints import stored_checkpoints
from storage.stores.base import Store

_MOST = 3
"""Rollbacks of a run; after that a person has to look."""
_MOST_FACTOR = 1 / 3
"""Factor of the learning rate at a rollback, in addition to those of earlier rollbacks."""


def roll_back(
    store: Store, decisions: Decisions, collapse: Collapse, *, incarnation: int, max_staleness: int
) -> RolledBack:
    """Stores the decision of the trainer `incarnation` to roll back; returns the error that ends this trainer.

    Evaluations of abandoned versions are removed. Raises TrainingDiverged without a good checkpoint, or if the run has
    been rolled back too often, and Fenced if another trainer decides for this run.
    """
    done = sum(decision.action == ROLL_BACK for decision in decisions.all)
    if done >= _MOST:
        raise TrainingDiverged(f"training collapsed again after {done} rollbacks: {collapse.sentence}")
    steps = [step for step in stored_checkpoints(store) if step <= collapse.good_version]
    if not steps:
        raise TrainingDiverged(
            f"training collapsed before its first good checkpoint, so it can't be rolled back: {collapse.sentence}"
        )
    measured = {RATE_FACTOR: min(_MOST_FACTOR, collapse.rate_ratio), "bad_rate": collapse.bad_rate}
    reason = collapse.sentence
    if collapse.good_rate is not None:
        measured["good_rate"] = collapse.good_rate
        if collapse.rate_ratio < _MOST_FACTOR:
            reason += f"; the learning rate had risen from {collapse.good_rate:g} to {collapse.bad_rate:g}"
    decision = StoredDecision(
        t=time.time(),
        incarnation=incarnation,
        policy_version=steps[-1],
        action=ROLL_BACK,
        max_staleness=max_staleness,
        reason=reason,
        measured=measured,
    )
    decisions.add(decision)
    version = steps[-1]
    for folder, newest_kept in (
        (layout.EVALUATIONS, layout.evaluation(version)),
        (layout.ANSWERS, layout.answers(version)),
    ):
        for entry in store.entries(folder):
            if entry.path > newest_kept:
                store.delete(entry.path)
    return RolledBack(f"{decision.change}: {decision.reason}")
