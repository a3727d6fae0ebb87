"""Detects that nothing moves in a run although all its stages live.

status, polled ─► ledger, steps ──no change for so long──► pipeline.stalled

It is reported once until its cause is over. The caller passes the time.
"""

from collections.abc import Mapping
from typing import Any

from millrace.runs.status import STAGES
from millrace.runtime.messages import LOADING, STARTING, STOPPED, Event

Status = Mapping[str, Any]
"""A status of `millrace.runs.status.StatusReader`. Used: `ledger`, `steps`, `advances`, `doing`."""


class StallDetector:
    """Detects that nothing moves: no trajectory generated, scored, trained or dropped, no optimizer step, and no
    progress within one.

    Stages that all send heartbeats may still wait for each other for ever. Time does not count while a stage starts or
    loads its model, for which its supervisor has its own limit, or while one has not started yet or has drained. Call
    it only while the run trains.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: Mapping[str, Any] | None = None
        self._moved = 0.0
        self._reported = False

    def look(self, status: Status, now: float) -> Event | None:
        """Once per stall: `pipeline.stalled` with what each stage is doing."""
        counts = {name: status[name] for name in ("ledger", "steps", "advances")}
        if counts != self._counts or _excused(status["doing"]):
            self._counts, self._moved, self._reported = counts, now, False
            return None
        silent = now - self._moved
        if self._reported or silent < self._seconds:
            return None
        self._reported = True
        return Event(kind="pipeline.stalled", payload={"seconds": round(silent, 1), "doing": dict(status["doing"])})


def _excused(doing: Mapping[str, str]) -> bool:
    return any(
        name.rpartition("-")[0] in STAGES and what in (STARTING, LOADING, STOPPED) for name, what in doing.items()
    )
