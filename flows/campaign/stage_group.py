"""The stage tasks that run side by side in one flow run. When one of them ends, stop the rest.

add ×n ─► wait_for_first, polling ─► STOP ─► all drained ─► result of each
                                       └─ asked once more ─► STOP_NOW ─► all killed
"""

import math
import queue
import time
from collections.abc import Callable
from types import TracebackType

from prefect import get_run_logger
from prefect.futures import PrefectFuture

from tasks.stop import STOP, STOP_NOW

_POLL_SECONDS = 0.5


class StageGroup:
    """Collects submitted stage tasks within its `with` block, and stops all of them at its end."""

    def __init__(self) -> None:
        self._started: list[tuple[str, PrefectFuture[None]]] = []
        self._ended: queue.Queue[tuple[str, PrefectFuture[None]]] = queue.Queue()

    def add(self, stage: str, future: PrefectFuture[None]) -> None:
        """Adds the task of `stage`, such as `train-0`."""
        self._started.append((stage, future))
        future.add_done_callback(lambda done: self._ended.put((stage, done)))

    def wait_for_first(self, ends_at: float = math.inf, asked_to_stop: Callable[[], bool] = STOP.is_set) -> str | None:
        """The first stage that ends by itself; None once asked to stop, or at `ends_at` (time.monotonic).

        Raises the error of a stage that failed. Polls, so that a signal or a cancellation is delivered here.
        """
        while time.monotonic() < ends_at and not asked_to_stop():
            try:
                stage, future = self._ended.get(timeout=_POLL_SECONDS)
            except queue.Empty:
                continue
            future.result()
            return stage
        return None

    def _wait_for_all(self) -> None:
        for _, future in self._started:
            future.wait()

    def __enter__(self) -> "StageGroup":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        STOP.set()
        try:
            self._wait_for_all()
        except BaseException:
            # Ctrl-C or SIGTERM once more: nobody wants to wait for what the stages are doing.
            STOP_NOW.set()
            self._wait_for_all()
            raise
        for stage, future in self._started:
            if kind is None and stage == "train-0":
                # If draining the trainer failed, the work since its last checkpoint is lost: raise its error.
                future.result()
            elif not future.state.is_completed():
                # What the stage had committed counts; the rest was never part of the run.
                get_run_logger().warning("a stage did not drain by itself: %s", future.state.message)
        get_run_logger().info("all stages ended")
