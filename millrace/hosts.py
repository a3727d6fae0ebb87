"""How a controller and the stages that it has placed elsewhere know of each other: by signs of life in the run's store.

    controller: Beacon ──progress/controller-0──► Watch ─┐                  its stages drain when it says so,
                                                         ├─ a flow run `stages` on another host      or is silent
    controller: Watch ◄──progress/<place>-<n>─── Beacon ─┘        it starts them elsewhere when they are silent

No clock is compared with another host's: a watch measures by its own how long a counter has stood still.
"""

import contextlib
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from millrace.background import Background
from storage.errors import StorageError
from storage.progress import read_life, write_progress
from storage.store import Store

BEAT_SECONDS = 2.0
SILENT_SECONDS = 40.0
"""Whoever has not beaten for so long is taken to be gone. What it may still commit, its stream's fence refuses."""

CONTROLLER = "controller"


class Beacon(Background):
    """Writes a sign of life every `BEAT_SECONDS` while its `with` block lasts, and at every `say`.

    `of` tells this one from those that others wrote under the same name before, or write still. `draining` is asked at
    each beat.
    """

    def __init__(
        self, store: Store, name: str, number: int, *, of: str, doing: str, draining: Callable[[], bool]
    ) -> None:
        super().__init__(f"beacon {name}-{number}", join_seconds=None)
        self._store = store
        self._name = name
        self._number = number
        self._values: dict[str, Any] = {"of": of, "doing": doing}
        self._draining = draining
        self._beat = 0
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        self.say()
        return super().__enter__()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        super().__exit__(kind, error, traceback)
        with contextlib.suppress(StorageError, OSError):
            self.say(doing="stopped")

    def say(self, **values: Any) -> None:
        """Adds to what the sign of life says, and writes it. Raises StorageError."""
        with self._lock:
            self._values |= values
            self._beat += 1
            own = {"beat": self._beat, "t": time.time(), "draining": self._draining()}
            write_progress(self._store, self._name, self._number, {**self._values, **own})

    def _run(self) -> None:
        while not self._over.wait(BEAT_SECONDS):
            # Where the store is out of reach, whoever watches hears nothing, which is what there is to say.
            with contextlib.suppress(StorageError, OSError):
                self.say()


class Watch:
    """Of one sign of life: what it says, and for how long it has not changed."""

    def __init__(self, store: Store, name: str, number: int) -> None:
        self._store = store
        self._name = name
        self._number = number
        self._beat: object = None
        self._heard = time.monotonic()
        self.life: dict[str, Any] = {}
        """As it was last read; empty: never."""

    def look(self) -> float:
        """Reads it; returns for how many seconds nothing new was read. A store out of reach is silence too."""
        try:
            life = read_life(self._store, self._name, self._number)
        except (StorageError, OSError):
            life = self.life
        beat = (life.get("of"), life.get("beat"))
        if life and beat != self._beat:
            self._beat, self._heard = beat, time.monotonic()
            self.life = life
        return time.monotonic() - self._heard
