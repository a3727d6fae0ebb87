"""A thread that runs as long as a `with` block."""

import contextvars
import threading
from abc import ABC, abstractmethod
from typing import Self


class Background(ABC):
    """Runs `_run` in a new thread, which must end soon after `_over` is set.

    The thread gets a copy of the creator's context, which holds Prefect's server address and current flow run.
    `join_seconds`: how long the end of the block waits for the thread; None: until it has ended.
    """

    def __init__(self, name: str, *, join_seconds: float | None) -> None:
        self._over = threading.Event()
        self._join_seconds = join_seconds
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """The thread's work, until `_over` is set."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *error: object) -> None:
        self._over.set()
        self._thread.join(timeout=self._join_seconds)
