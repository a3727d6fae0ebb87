"""A store in this process's memory, for tests: the contract of `Store` without a disk."""

import threading
from pathlib import Path
from typing import ClassVar

from storage.errors import NotInStore
from storage.store import BytesLike, Store, checked_path


class MemoryStore(Store):
    """Every store of the process shares one space, so `memory://a` sees what lies in `memory://a/b` under `b/`."""

    _objects: ClassVar[dict[str, bytes]] = {}
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, name: str) -> None:
        root = name.strip("/")
        self.url = f"memory://{root}"
        self._prefix = f"{root}/" if root else ""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        key = self._key(path)
        with self._lock:
            if key in self._objects:
                return False
            self._objects[key] = bytes(data)
            return True

    def put(self, path: str, data: BytesLike) -> None:
        key = self._key(path)
        with self._lock:
            self._objects[key] = bytes(data)

    def get(self, path: str) -> memoryview:
        key = self._key(path)
        with self._lock:
            if key not in self._objects:
                raise NotInStore(f"{path}: not in {self.url}")
            return memoryview(self._objects[key])

    def exists(self, path: str) -> bool:
        key = self._key(path)
        with self._lock:
            return key in self._objects

    def list(self, prefix: str = "") -> list[str]:
        folder = f"{self._key(prefix)}/" if prefix else self._prefix
        with self._lock:
            return sorted(key.removeprefix(self._prefix) for key in self._objects if key.startswith(folder))

    def delete_tree(self, prefix: str) -> None:
        folder = f"{self._key(prefix)}/"
        with self._lock:
            for key in [key for key in self._objects if key.startswith(folder)]:
                del self._objects[key]

    def local_path(self, path: str) -> Path | None:
        return None

    def _key(self, path: str) -> str:
        return self._prefix + checked_path(path)
