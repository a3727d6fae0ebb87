"""Back to a checkpoint from before training collapsed.

    collapse ─► newest checkpoint up to the last good version ─► decisions/<n>.json ─► this trainer ends
                                                                       │
    a new trainer ─► checkpoints that were given up are skipped ◄──────┘ ─► lineage, ledger, streams as after a kill
                  └► a third of the learning rate

A trainer that merely started again would collapse again: in sync mode on the same rollouts.
"""

import time

from millrace.control.collapse import Collapse
from millrace.control.decisions import ROLL_BACK, Decisions
from millrace.errors import RolledBack, TrainingDiverged
from millrace.runs.decisions import StoredDecision
from millrace.weights.base import Terms
from storage import layout
from storage.checkpoints import stored_checkpoints
from storage.stores.base import Store

_MOST = 3
"""Rollbacks of a run; what then still collapses needs a person."""


def roll_back(store: Store, decisions: Decisions, collapse: Collapse, *, incarnation: int, terms: Terms) -> RolledBack:
    """Decides to go back, for the trainer `incarnation`; returns what it is to end with, once that is stored.

    Results of evaluations of versions that are given up are removed. Raises TrainingDiverged if there is no checkpoint
    to go back to, or the run has been rolled back too often, and Fenced if another trainer decides for this run.
    """
    done = sum(one.action == ROLL_BACK for one in decisions.all)
    if done >= _MOST:
        raise TrainingDiverged(f"training collapsed again after {done} rollbacks: {collapse.sentence}")
    steps = [step for step in stored_checkpoints(store) if step <= collapse.good_version]
    if not steps:
        raise TrainingDiverged(
            f"training collapsed before its first good checkpoint, so it can't be rolled back: {collapse.sentence}"
        )
    decisions.add(
        StoredDecision(
            t=time.time(),
            incarnation=incarnation,
            policy_version=steps[-1],
            action=ROLL_BACK,
            max_staleness=terms.max_staleness,
            places=terms.places,
            reason=collapse.sentence,
        )
    )
    for entry in store.entries(layout.EVALUATIONS):
        if entry.path > layout.evaluation(steps[-1]):
            store.delete(entry.path)
    return RolledBack(f"rolled back to version {steps[-1]}: {collapse.sentence}")
