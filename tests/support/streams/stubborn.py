"""A writer and a reader that take no error for an answer, as a stage that is restarted again and again.

Writer     open ──► write rows `.rows` … ──► OSError: committed or not? ──► open again, go on from `.rows`
Reader     next ──► OSError, or a part that does not verify: nothing was passed ──► look again
"""

from collections.abc import Callable
from typing import TypeVar

from support.streams.numbered import PATH, numbered, open_reader

from storage.errors import Fenced, StreamCorrupt
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.stream import Part, StreamWriter

T = TypeVar("T")
MOST_TRIES = 1000


class StubbornWriter:
    """Writes numbered rows through a store that fails, knowing nothing but what `StreamWriter.rows` says."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.opened = 0
        """Writers that were opened, or may have been."""
        self.writer = self._open()

    def write(self, rows: int) -> None:
        """Commit the next `rows` rows as one part. Raises Fenced."""
        first = self.writer.rows
        for _ in range(MOST_TRIES):
            if self.writer.rows > first:
                return
            try:
                self.writer.write(numbered(first, rows), tokens=rows)
            except Fenced:
                raise
            except (OSError, StreamCorrupt):
                self.writer = self._open()
        raise AssertionError(f"row {first} was not committed in {MOST_TRIES} tries")

    def _open(self) -> StreamWriter:
        def open_writer() -> StreamWriter:
            self.opened += 1
            return StreamWriter(self._store, PATH, METRIC, f"writer {self.opened}")

        return insist(open_writer)


class StubbornReader:
    """Reads the numbered rows through a store that fails; `numbers` are those read so far."""

    def __init__(self, store: Store) -> None:
        self.reader = insist(lambda: open_reader(store))
        self.numbers: list[int] = []

    def take(self) -> None:
        """Read on until there is no news."""
        while (part := insist(self._next)) is not None:
            self.numbers += part.table["policy_version"].to_pylist()

    def _next(self) -> Part | None:
        return self.reader.next()


def insist(call: Callable[[], T]) -> T:
    """What `call` returns once neither the store nor a passing damage gets into its way."""
    for _ in range(MOST_TRIES):
        try:
            return call()
        except Fenced:
            raise
        except (OSError, StreamCorrupt) as error:
            last = error
    raise AssertionError(f"{MOST_TRIES} tries, and then: {last!r}")
