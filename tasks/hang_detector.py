"""Detects a hung stage: its main thread has sent no heartbeat for longer than its limit.

started ──► start_seconds without a heartbeat ─► hung      imports, loading the model
ready   ──► hang_seconds without a heartbeat ──► hung      at work; each heartbeat restarts the time
"""

from millrace.runtime.messages import STARTING, Heartbeat

_MAX_CHECK_SECONDS = 1.0
"""At most this much counts between two checks. A supervisor that was itself stopped or starved for minutes received
nothing in that time. That is not the stage's fault: its heartbeats may wait in the pipe."""


class HangDetector:
    """Watches one stage process. `started` and `now` are seconds of the same clock.

    Without `hang_seconds`, `start_seconds` applies to a stage at work as well.
    """

    def __init__(self, *, started: float, hang_seconds: float | None, start_seconds: float) -> None:
        self.silent_seconds = 0.0
        """Time since the last heartbeat."""
        self.doing = STARTING
        """The activity in the last heartbeat."""
        self.at_work_seconds = 0.0
        """Time since the stage became ready."""
        self.hang_seconds = start_seconds if hang_seconds is None else hang_seconds
        self._start_seconds = start_seconds
        self._at_work_limit = "start_seconds" if hang_seconds is None else "hang_seconds"
        self.is_at_work = False
        self._checked = started

    @property
    def limit(self) -> str:
        """The setting in `supervision` that applies now."""
        return self._at_work_limit if self.is_at_work else "start_seconds"

    def record(self, heartbeat: Heartbeat) -> None:
        self.silent_seconds = 0.0
        self.doing = heartbeat.doing
        self.is_at_work = heartbeat.ready

    def hangs(self, now: float) -> bool:
        """Returns whether the stage hangs; call it often."""
        passed = min(now - self._checked, _MAX_CHECK_SECONDS)
        self._checked = now
        self.silent_seconds += passed
        if self.is_at_work:
            self.at_work_seconds += passed
        return self.silent_seconds > (self.hang_seconds if self.is_at_work else self._start_seconds)
