"""A writer and a reader that take no error for an answer, as a stage that is restarted again and again.

Writer     open ──► write rows `.rows` … ──► OSError: committed or not? ──► open again, continue from `.rows`
Reader     next ──► OSError, or a part that does not verify: nothing was passed ──► look again
"""

from collections.abc import Callable
from typing import TypeVar

from support.streams.numbered import PATH, numbered, open_reader

from storage.errors import Fenced, StreamCorrupt
from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.stream import StreamWriter

T = TypeVar("T")
MOST_TRIES = 1000


def insist(call: Callable[[], T]) -> T:
    """Repeats `call` until it neither meets an error of the store nor a passing damage. Raises Fenced."""
    for _ in range(MOST_TRIES):
        try:
            return call()
        except Fenced:
            raise
        except (OSError, StreamCorrupt) as error:
            last = error
    raise AssertionError(f"{MOST_TRIES} tries, and then: {last!r}")


class StubbornWriter:
    """Writes numbered rows through a store that fails, knowing nothing but what `StreamWriter.rows` says."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self.opened = 0
        """Writers that were opened, or may have been."""
        self.writer = insist(self._open)

    def write(self, rows: int) -> None:
        """Commits the next `rows` rows as one part. Raises Fenced."""
        first = self.writer.rows

        def write_once() -> None:
            if self.writer.rows == first:
                try:
                    self.writer.write(numbered(first, rows), tokens=rows)
                except (OSError, StreamCorrupt) as error:
                    if not isinstance(error, Fenced):
                        self.writer = insist(self._open)
                    raise

        insist(write_once)

    def _open(self) -> StreamWriter:
        self.opened += 1
        return StreamWriter(self._store, PATH, METRIC, f"writer {self.opened}")


class StubbornReader:
    """Reads the numbered rows through a store that fails; `numbers` are those read so far."""

    def __init__(self, store: Store) -> None:
        self.reader = insist(lambda: open_reader(store))
        self.numbers: list[int] = []

    def take(self) -> None:
        """Reads all parts up to the head."""
        while (part := insist(self.reader.next)) is not None:
            self.numbers += part.table["policy_version"].to_pylist()
