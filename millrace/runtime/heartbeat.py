"""How a controller and stages on other hosts know of each other: by status records in the run's store.

    controller: publisher ──progress/controller-0──► monitor ───┐              its stages drain when told to,
                                                                ├─ flow `stages` on another host   or when it is silent
    controller: monitor ◄──progress/place-<stage>-<n>─ publisher┘      the controller restarts them when they are silent

No clock is compared with another host's: a monitor measures with its own clock how long a counter has not changed.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from millrace.runtime.background import Background
from storage.errors import StorageError
from storage.progress import read_status, write_progress
from storage.stores.base import Store

HEARTBEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0
"""A process that has sent no heartbeat for so long counts as lost. If it still commits, its stream's fence refuses."""


class HeartbeatPublisher(Background):
    """Writes a status record every `HEARTBEAT_SECONDS` while its `with` block lasts, and at every `publish`.

    `owner_id` tells this publisher from others that write, or wrote, under the same name. `draining` is called for each
    record.
    """

    def __init__(
        self, store: Store, name: str, number: int, *, owner_id: str, doing: str, draining: Callable[[], bool]
    ) -> None:
        super().__init__(f"heartbeat {name}-{number}", join_seconds=None)
        self._store = store
        self._name = name
        self._number = number
        self._values: dict[str, Any] = {"of": owner_id, "doing": doing}
        self._draining = draining
        self._count = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.publish()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        with contextlib.suppress(StorageError, OSError):
            self.publish(doing="stopped")

    def publish(self, **values: Any) -> None:
        """Adds values to the status record and writes it. Raises StorageError."""
        with self._lock:
            self._values |= values
            self._count += 1
            own = {"beat": self._count, "t": time.time(), "draining": self._draining()}
            write_progress(self._store, self._name, self._number, {**self._values, **own})

    def _run(self) -> None:
        while not self._over.wait(HEARTBEAT_SECONDS):
            # If the store is out of reach, the monitor sees silence, which is the right conclusion.
            with contextlib.suppress(StorageError, OSError):
                self.publish()


class HeartbeatMonitor:
    """Reads one status record, and measures for how long it has not changed."""

    def __init__(self, store: Store, name: str, number: int) -> None:
        self._store = store
        self._name = name
        self._number = number
        self._last: tuple[object, object] | None = None
        self._changed = time.monotonic()
        self.status: dict[str, Any] = {}
        """The record as it was last read; empty before the first."""

    @property
    def owner_id(self) -> str | None:
        """The `owner_id` of its publisher; None before the first record."""
        return self.status.get("of")

    def look(self) -> float:
        """Reads the record; returns for how many seconds it has not changed. An unreachable store counts as silence."""
        try:
            status = read_status(self._store, self._name, self._number)
        except (StorageError, OSError):
            status = {}
        heartbeat = (status.get("of"), status.get("beat"))
        if status and heartbeat != self._last:
            self._last, self._changed, self.status = heartbeat, time.monotonic(), status
        return time.monotonic() - self._changed
