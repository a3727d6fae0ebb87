"""The upper bound of a store: the same bytes, moved with as few calls as possible.

           write                            read
a folder   one file, one write, fsync       memcpy into memory that is there already
s3://      one PUT                          one GET
"""

import os
import uuid
from abc import ABC, abstractmethod
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import obstore
from obstore.store import S3Store

from storage.stores.base import Store
from storage.stores.s3_settings import read_settings


class Bound(ABC):
    """Moves its bytes as fast as the store allows."""

    write_name: str
    """What `write` does, for people."""
    read_name: str
    """What `read` does, for people."""

    @abstractmethod
    def write(self) -> None:
        """Write the bytes durably, under a fresh name."""

    @abstractmethod
    def read(self) -> None:
        """Read the bytes once."""

    @abstractmethod
    def clear(self) -> None:
        """Delete what `write` wrote."""


class FolderBound(Bound):
    """The bound of a local store: its disk for writes, this machine's memory for reads."""

    write_name = "write + fsync"
    read_name = "memcpy"

    def __init__(self, folder: Path, data: memoryview) -> None:
        self._folder = folder
        self._source = np.frombuffer(data, np.uint8).copy()
        self._target = np.zeros_like(self._source)
        self._files: list[Path] = []

    def write(self) -> None:
        file = self._folder / f"raw-{uuid.uuid4().hex}"
        self._files.append(file)
        with file.open("xb", buffering=0) as raw:
            # A regular file takes it in one call, short of a full disk.
            written = raw.write(self._source.data)
            os.fsync(raw.fileno())
        if written != len(self._source):
            raise OSError(f"{file}: the disk took {written} of {len(self._source)} bytes")

    def read(self) -> None:
        np.copyto(self._target, self._source)

    def clear(self) -> None:
        while self._files:
            self._files.pop().unlink()


class ObjectBound(Bound):
    """The bound of an object store at `url`: requests of the client library, and nothing around them."""

    write_name = "PUT"
    read_name = "GET"

    def __init__(self, url: str, folder: str, data: memoryview) -> None:
        settings = read_settings(os.environ)
        self._store = S3Store.from_url(url, config=settings.config, client_options={"allow_http": True})
        self._data = bytes(data)
        self._folder = folder
        self._paths: list[str] = []
        self.write()

    def write(self) -> None:
        path = f"{self._folder}/raw-{uuid.uuid4().hex}"
        self._paths.append(path)
        obstore.put(self._store, path, self._data, use_multipart=False)

    def read(self) -> None:
        obstore.get(self._store, self._paths[0]).bytes()

    def read_many(self, times: int, at_once: int) -> None:
        """As `times` calls of `read`, `at_once` of them at a time."""
        with ThreadPoolExecutor(at_once) as threads:
            for _ in threads.map(lambda _: self.read(), range(times)):
                pass

    def clear(self) -> None:
        # The first one is what `read` gets.
        while len(self._paths) > 1:
            obstore.delete(self._store, self._paths.pop())


def bound_of(store: Store, folder: str, data: memoryview) -> Bound:
    """The bound of `store` for moving `data` to and from its folder `folder`, which exists."""
    local = store.local_path(folder)
    return ObjectBound(store.url, folder, data) if local is None else FolderBound(local, data)
