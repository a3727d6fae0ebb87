"""The stage tasks that run side by side in one flow run: the first to end ends the others.

start ×n ─► first_to_end, in short waits ─► STOP ─► all drained ─► result of each
"""

import math
import queue
import time
from collections.abc import Callable
from types import TracebackType

from prefect import get_run_logger
from prefect.futures import PrefectFuture

from tasks.stop import STOP

_LOOK_SECONDS = 0.5


class Running:
    """Starts stage tasks within its `with` block; whatever happens in there, at its end none is left behind."""

    def __init__(self) -> None:
        self._started: list[tuple[str, PrefectFuture[None]]] = []
        self._ended: queue.Queue[tuple[str, PrefectFuture[None]]] = queue.Queue()

    def start(self, stage: str, future: PrefectFuture[None]) -> None:
        """Takes charge of a task that was submitted."""
        self._started.append((stage, future))
        future.add_done_callback(lambda done: self._ended.put((stage, done)))

    def first_to_end(self, ends_at: float = math.inf, asked_to_stop: Callable[[], bool] = STOP.is_set) -> str | None:
        """The stage that ended first, by itself; None once somebody asks to stop, or it is `ends_at` on the clock of
        time.monotonic.

        Raises the error of one that ended with an error. Waits in short steps, so that a signal or a cancellation is
        delivered here.
        """
        while time.monotonic() < ends_at and not asked_to_stop():
            try:
                stage, future = self._ended.get(timeout=_LOOK_SECONDS)
            except queue.Empty:
                continue
            future.result()
            return stage
        return None

    def __enter__(self) -> "Running":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        STOP.set()
        for _, future in self._started:
            future.wait()
        for stage, future in self._started:
            if kind is None and stage == "train":
                # What it had done since its last checkpoint is lost if draining it failed.
                future.result()
            elif not future.state.is_completed():
                # What it had committed counts; what it had not was never part of the run.
                get_run_logger().warning("a stage did not drain by itself: %s", future.state.message)
        get_run_logger().info("all stages ended")
