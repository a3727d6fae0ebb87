"""A thread that lives as long as a `with` block: what watches, shows or reports beside the main thread."""

import contextvars
import threading
from abc import ABC, abstractmethod
from types import TracebackType
from typing import Self


class Background(ABC):
    """Runs `_run` in a thread of its own, which is to end soon after `_over` is set.

    It runs in a copy of the context that made it: which server Prefect talks to is part of that, and to which flow run
    what it says belongs. `join_seconds`: how long the block's end waits for it; None: until it has ended.
    """

    def __init__(self, name: str, *, join_seconds: float | None) -> None:
        self._over = threading.Event()
        self._join_seconds = join_seconds
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name=name, daemon=True)

    @abstractmethod
    def _run(self) -> None:
        """Until `_over` is set."""

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()
        self._thread.join(timeout=self._join_seconds)
