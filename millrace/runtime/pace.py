"""How fast a trainer makes its steps."""

import time
from collections.abc import Callable


class Pace:
    """Mean pace of one trainer process, from the end of its first step: the one before waited for the pipeline to fill.

    `clock` is a monotonic clock in seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._first: float | None = None
        self._steps = 0
        self._tokens = 0.0

    def step(self, tokens: float) -> dict[str, float]:
        """Counts a step that ends now and trained so many response tokens.

        Returns `step_seconds` and `tokens_per_second` so far; nothing after the first step.
        """
        now = self._clock()
        if self._first is None:
            self._first = now
            return {}
        self._steps += 1
        self._tokens += tokens
        seconds = now - self._first
        return {"step_seconds": seconds / self._steps, "tokens_per_second": self._tokens / seconds} if seconds else {}
