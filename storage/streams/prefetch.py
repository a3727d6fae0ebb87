"""Prefetching for a reader that is catching up on a remote store.

    reader asks for record n ──► prefetched? ─ yes ─► return it ──► threads get log/n+1 … n+8, and their files
                                     └─ no ─► get it now ─┘         if the reader asks for files
                                                 └─ not there: the head. Prefetching stops

Prefetched data is still verified in order. An error in a thread is raised when the reader asks for that object. There
are never more prefetches than records found since the reader was last at the head: a reader that waits at the head
makes one request per look, besides the log's own requests for a snapshot.
"""

from concurrent.futures import Future
from threading import Thread

from storage import layout
from storage.errors import NotInStore, StorageError
from storage.stores.base import Store
from storage.streams.record import decode

DEPTH = 8
"""Most records prefetched, with their files: this bounds the memory."""


class ReadAhead:
    """A source that prefetches from `store` for one reader of the log in the folder `path`. Not thread-safe."""

    def __init__(self, store: Store, path: str, depth: int = DEPTH) -> None:
        self._store = store
        self._path = path
        self._depth = depth
        self._ahead: dict[int, _Prefetch] = {}
        self._current: _Prefetch | None = None
        """Where the current record came from, if it was prefetched."""
        self._last = -1
        self._found = 0
        self._file_asked = False
        self._files_in_a_row = 0

    def get(self, path: str) -> memoryview:
        """The object's bytes. Raises NotInStore, and whatever the store raised for it."""
        seq = layout.record_seq(path)
        if seq is not None:
            return self._get_record(path, seq)
        self._file_asked = True
        if self._current and self._current.file_path.result() == path:
            prefetch, self._current = self._current, None
            return prefetch.file.result()
        return self._store.get(path)

    def _get_record(self, path: str, seq: int) -> memoryview:
        self._current = self._ahead.pop(seq, None)
        try:
            data = self._current.record.result() if self._current else self._store.get(path)
        except NotInStore:
            prefetched = self._current is not None
            self._ahead, self._current, self._found = {}, None, 0
            if not prefetched:
                raise
            # It may have been committed since the prefetch.
            data = self._store.get(path)
        if seq != self._last:
            self._last = seq
            self._found += 1
            self._files_in_a_row = self._files_in_a_row + 1 if self._file_asked else 0
            self._file_asked = False
            self._look_ahead(seq)
        return data

    def _look_ahead(self, seq: int) -> None:
        self._ahead = {number: prefetch for number, prefetch in self._ahead.items() if number > seq}
        for number in range(seq + 1, seq + 1 + min(self._depth, self._found - 1)):
            if number not in self._ahead:
                # A reader that wants every other part, as one of two scorers does, never asks for two files in a row.
                self._ahead[number] = _Prefetch(self._store, self._path, number, with_file=self._files_in_a_row > 1)
            elif self._ahead[number].is_in_vain:
                return


class _Prefetch:
    """A record being prefetched in its own thread, and the file it names."""

    def __init__(self, store: Store, path: str, seq: int, *, with_file: bool) -> None:
        self.record: Future[memoryview] = Future()
        self.file_path: Future[str | None] = Future()
        """None if no file is prefetched."""
        self.file: Future[memoryview] = Future()
        # A daemon thread: the process must not wait for it at exit.
        Thread(target=self._run, args=(store, path, seq, with_file), name=f"ahead {path} {seq}", daemon=True).start()

    @property
    def is_in_vain(self) -> bool:
        """Whether there was no such record yet."""
        return self.record.done() and isinstance(self.record.exception(), NotInStore)

    def _run(self, store: Store, path: str, seq: int, with_file: bool) -> None:
        record_path = f"{path}/{layout.record(seq)}"
        _settle(self.record, store, record_path)
        file_path = None
        try:
            if with_file and self.record.exception() is None:
                record = decode(bytes(self.record.result()), record_path)
                if record.kind == "data":
                    file_path = f"{path}/{record.file}"
        except StorageError:
            # The reader will find the same when it comes to this record.
            pass
        finally:
            self.file_path.set_result(file_path)
        if file_path:
            _settle(self.file, store, file_path)


def _settle(future: Future[memoryview], store: Store, path: str) -> None:
    try:
        future.set_result(store.get(path))
    except BaseException as error:  # noqa: BLE001 — raised in the reader's own thread, when it asks
        future.set_exception(error)
