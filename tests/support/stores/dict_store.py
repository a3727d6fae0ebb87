"""A store that is a dictionary, as fast as a store can be: for tests that read a run thousands of times."""

import threading
import time
from pathlib import Path

from storage.errors import NotInStore
from storage.stores.base import BytesLike, Entry, Store, checked_path


class DictStore(Store):
    """Keeps every object in `objects`, which a test may look at and damage."""

    url = "dict://"
    poll_seconds = 0.0

    def __init__(self, objects: dict[str, bytes] | None = None) -> None:
        self.objects = {} if objects is None else objects
        """Object by path."""
        self._t_modified: dict[str, float] = {}
        self._lock = threading.Lock()

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        with self._lock:
            if checked_path(path) in self.objects:
                return False
            self._set(path, data)
            return True

    def put(self, path: str, data: BytesLike) -> None:
        with self._lock:
            self._set(checked_path(path), data)

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        try:
            data = memoryview(self.objects[checked_path(path)])
        except KeyError as error:
            raise NotInStore(f"{path}: not in {self.url}") from error
        return data[start:] if length is None else data[start : start + length]

    def exists(self, path: str) -> bool:
        return checked_path(path) in self.objects

    def entries(self, prefix: str = "") -> list[Entry]:
        folder = f"{checked_path(prefix)}/" if prefix else ""
        return [
            Entry(path=path, bytes=len(data), t_modified=self._t_modified.get(path, 0.0))
            for path, data in sorted(self.objects.items())
            if path.startswith(folder)
        ]

    def delete(self, path: str) -> None:
        self.objects.pop(checked_path(path), None)

    def delete_tree(self, prefix: str) -> None:
        for path in self.list(prefix):
            self.delete(path)

    def local_path(self, path: str) -> Path | None:
        return None

    def _set(self, path: str, data: BytesLike) -> None:
        self.objects[path] = bytes(data)
        self._t_modified[path] = time.time()
