"""When a stage counts as hung: its main thread has sent no heartbeat for longer than it may.

started ──► start_seconds without a heartbeat ─► hung      imports, loading the model
ready   ──► hang_seconds without a heartbeat ──► hung      at work; each heartbeat restarts the time
"""

from millrace.runtime.messages import STARTING, Heartbeat

_MAX_CHECK_SECONDS = 1.0
"""At most this much counts between two checks. A supervisor that was itself stopped or starved for minutes received
nothing in that time. That is not the stage's fault: its heartbeats may wait in the pipe."""


class HangDetector:
    """Watches one stage process. `started` and `now` are seconds of the same clock."""

    def __init__(self, *, started: float, hang_seconds: float, start_seconds: float) -> None:
        self.silent_seconds = 0.0
        """Time since the last heartbeat."""
        self.doing = STARTING
        """What the stage was doing at the last heartbeat."""
        self.at_work_seconds = 0.0
        """Time since the stage became ready."""
        self._hang_seconds = hang_seconds
        self._start_seconds = start_seconds
        self._ready = False
        self._checked = started

    def record(self, heartbeat: Heartbeat) -> None:
        """Takes note of a heartbeat."""
        self.silent_seconds = 0.0
        self.doing = heartbeat.doing
        self._ready = heartbeat.ready

    def hangs(self, now: float) -> bool:
        """Whether the stage hangs; call it often."""
        passed = min(now - self._checked, _MAX_CHECK_SECONDS)
        self._checked = now
        self.silent_seconds += passed
        if self._ready:
            self.at_work_seconds += passed
        return self.silent_seconds > (self._hang_seconds if self._ready else self._start_seconds)
