"""Single parts of streams, located by row.

║ log ║ ─► PartFinder: first row_id ─► record ─► PartReader: verified table, the last few cached
"""

import pyarrow as pa

from storage.errors import StorageError
from storage.stores.base import Store
from storage.streams.merged import PartFinder
from storage.streams.record import Record
from storage.streams.stream import read_part

_MAX_CACHED = 8


class PartReader:
    """Reads parts of the streams in `store` and caches the last few, as neighbouring groups often share a part."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._finders: dict[str, PartFinder] = {}
        self._tables: dict[tuple[str, int], pa.Table] = {}

    def record_of(self, path: str, row_id: int, problems: list[str]) -> Record | None:
        """Returns the part that contains the row; None if no readable record does. Read errors go to `problems`."""
        finder = self._finders.setdefault(path, PartFinder(self.store, path))
        try:
            record = finder.first(lambda record: row_id < record.first_row_id + record.rows)
        except StorageError as error:
            problems.append(str(error))
            return None
        return None if record is None or row_id < record.first_row_id else record

    def read(self, path: str, schema: pa.Schema, record: Record) -> pa.Table:
        """Reads all columns of a part. Raises like `storage.streams.stream.read_part`."""
        key = path, record.part
        table = self._tables.pop(key, None)
        self._tables[key] = read_part(self.store, path, schema, record) if table is None else table
        while len(self._tables) > _MAX_CACHED:
            del self._tables[next(iter(self._tables))]
        return self._tables[key]

    def try_read(self, path: str, schema: pa.Schema, record: Record, problems: list[str]) -> pa.Table | None:
        """Reads a part; if it can't be read, returns None and adds the error to `problems`."""
        try:
            return self.read(path, schema, record)
        except StorageError as error:
            problems.append(str(error))
            return None

    def part_of(self, path: str, schema: pa.Schema, row_id: int, problems: list[str]) -> tuple[Record, pa.Table] | None:
        """Reads the part that contains a row; None if no readable part does."""
        record = self.record_of(path, row_id, problems)
        table = None if record is None else self.try_read(path, schema, record, problems)
        return None if record is None or table is None else (record, table)
