"""A store that tells a virtual clock what was written, so that stages that wait for it look again."""

import json
from pathlib import Path
from typing import Any

from benchmarks.virtual_time.clock import VirtualClock
from storage import layout
from storage.stores.base import BytesLike, Entry, Store

_STREAMS = ("streams/trajectories/", "streams/scores/")
_DECIDING = ("groups_dropped", "oldest_version_in_flight")
"""What other stages read in a status record and act upon."""


class WatchedStore(Store):
    """Another store, watched. What nothing can depend on is not reported."""

    def __init__(self, clock: VirtualClock, store: Store) -> None:
        self.url = store.url
        self.poll_seconds = store.poll_seconds
        self._clock = clock
        self._store = store
        self._records: dict[str, list[Any]] = {}

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        created = self._store.put_if_absent(path, data)
        if path.startswith(_STREAMS):
            self._clock.changed()
        return created

    def put(self, path: str, data: BytesLike) -> None:
        self._store.put(path, data)
        if path.startswith(layout.PROGRESS):
            values = json.loads(bytes(data))
            before, self._records[path] = self._records.get(path), [values.get(name) for name in _DECIDING]
            if before != self._records[path]:
                self._clock.changed()

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        return self._store.get(path, start, length)

    def exists(self, path: str) -> bool:
        return self._store.exists(path)

    def entries(self, prefix: str = "") -> list[Entry]:
        return self._store.entries(prefix)

    def delete(self, path: str) -> None:
        self._store.delete(path)

    def delete_tree(self, prefix: str) -> None:
        self._store.delete_tree(prefix)

    def local_path(self, path: str) -> Path | None:
        # Never remote: threads that fetch ahead would not know the clock.
        return self._store.local_path(path) or (Path("/nowhere") if path == "" else None)
