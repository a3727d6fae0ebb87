"""Events of a run by policy version: incidents, restarts, decisions, promotions and config changes.

incidents, decisions (of the status) ┐
attempts: promotion, changes         ├─► latest_events: newest first      promotions, config_changes: for charts
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from dashboard.queries.series import clock, minutes
from dashboard.read.model import RunData

RESTART = "restart"
_KINDS = {"stage.restarted": RESTART}
"""Kind of incident in the status → kind of event; others are "incident"."""


class RunEvent(NamedTuple):
    """An event in a run."""

    t: float
    """Unix seconds."""
    kind: str
    """incident, restart, decision, promotion, held back or resumed."""
    policy_version: int
    """Newest policy version at that time; 0 before the first step."""
    words: str
    """One sentence that describes the event."""


def latest_events(run: RunData, most: int) -> Sequence[RunEvent]:
    """Returns at most `most` events, newest first."""
    decisions = [
        RunEvent(decision["t"], "decision", decision["policy_version"], f"{decision['change']}: {decision['reason']}")
        for decision in run.latest("decisions")
    ]
    events = [*incidents(run), *decisions, *_attempts(run)]
    return sorted(events, key=lambda event: event.t, reverse=True)[:most]


def incidents(run: RunData) -> list[RunEvent]:
    """Returns the latest incidents of the status."""
    return [
        RunEvent(incident["t"], _KINDS.get(incident["kind"], "incident"), _version_at(run, incident["t"]), words)
        for incident in run.latest("incidents")
        for words in [str(incident["sentence"])]
    ]


def promotions(run: RunData) -> Mapping[int, str]:
    """Promoted policy version → headline of the promotion."""
    decisions = [attempt.promotion for attempt in run.info.attempts if attempt.promotion is not None]
    return {decision.policy_version: decision.headline for decision in decisions if decision.promoted}


def config_changes(run: RunData) -> Mapping[int, Sequence[str]]:
    """Policy version at which the run was resumed → one sentence per changed setting."""
    return {attempt.first_step: attempt.changes for attempt in run.info.attempts[1:] if attempt.changes}


def _attempts(run: RunData) -> list[RunEvent]:
    events = []
    for attempt in run.info.attempts:
        if attempt.number:
            words = "; ".join(attempt.changes) or "with the same config"
            if run.info.attempts[attempt.number - 1].end is None:
                words = f"after a kill, {words}"
            events.append(RunEvent(attempt.t_started, "resumed", attempt.first_step, words))
        if (decision := attempt.promotion) is not None and attempt.end is not None:
            kind = "promotion" if decision.promoted else "held back"
            # The gate decides at the end of an attempt.
            events.append(RunEvent(attempt.end.t, kind, decision.policy_version, decision.headline))
    return events


def _version_at(run: RunData, t: float) -> int:
    at = clock(run)
    if not len(at.x):
        return 0
    made = int(np.searchsorted(at.y, minutes(run, np.array([t]))[0], side="right"))
    return int(at.x[made - 1]) if made else 0
