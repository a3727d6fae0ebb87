"""What a stage process says to its supervisor, a line at a time, on the pipe that was its standard output.

milestones, events ──────────────────────────────────────┐
beats: at once where it is at something new, else ≤ 1/s ─┴─► pipe ─► supervisor        the words: `millrace.events`
"""

import os
import time
from typing import TextIO

from millrace.events import Beat, beat_line

_BEAT_SECONDS = 1.0

# Where lines go once `keep_apart` has been called; None: standard output.
_pipe: TextIO | None = None


def keep_apart() -> None:
    """From here on, what libraries and their processes print goes to the stage's log, not among its lines."""
    global _pipe
    _pipe = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)


def speak(line: str) -> None:
    """Says one line. Raises BrokenPipeError where nobody listens any more."""
    print(line, file=_pipe, flush=True)


class Pulse:
    """Beats: at most one a second, unless the stage is at something else than it said last.

    Nothing beats by itself, and no thread does it: a main thread that hangs must fall silent.
    """

    def __init__(self) -> None:
        self._last: Beat | None = None
        self._spoken = 0.0

    def beat(self, beat: Beat) -> None:
        """Says it, if it is time. Raises BrokenPipeError where nobody listens any more."""
        now = time.monotonic()
        if beat == self._last and now - self._spoken < _BEAT_SECONDS:
            return
        self._last, self._spoken = beat, now
        speak(beat_line(beat))
