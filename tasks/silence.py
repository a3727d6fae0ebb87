"""When a stage is taken to hang: its main thread has not beaten for longer than it may.

started ──► start_seconds without a beat ─► hangs        imports, loading the model
ready   ──► hang_seconds without a beat ──► hangs        at work; each beat begins anew
"""

from millrace.events import STARTING, Beat

_MOST_A_LOOK_SECONDS = 1.0
"""Of the time between two looks no more is counted. A supervisor that was itself stopped or starved for minutes has
heard nothing in that time, which is no fault of the stage's: its beats may lie in the pipe."""


class Silence:
    """Of one stage process. `started` is when it was started; that and `now` are seconds of the same clock."""

    def __init__(self, *, started: float, hang_seconds: float, start_seconds: float) -> None:
        self.seconds = 0.0
        """How long it has been silent."""
        self.doing = STARTING
        """What it was at when it was last heard."""
        self.at_work_seconds = 0.0
        """How long it has been ready."""
        self._hang_seconds = hang_seconds
        self._start_seconds = start_seconds
        self._ready = False
        self._looked = started

    def hear(self, beat: Beat) -> None:
        """It beat."""
        self.seconds = 0.0
        self.doing = beat.doing
        self._ready = beat.ready

    def look(self, now: float) -> bool:
        """Whether it hangs."""
        passed = min(now - self._looked, _MOST_A_LOOK_SECONDS)
        self._looked = now
        self.seconds += passed
        if self._ready:
            self.at_work_seconds += passed
        return self.seconds > (self._hang_seconds if self._ready else self._start_seconds)
