"""Single parts of streams, located by row.

║ log ║ ─► StreamIndex: first row_id, versions ─► record ─► PartReader: verified table, the last few cached
"""

from bisect import bisect_right
from functools import lru_cache

import pyarrow as pa

from storage.errors import StorageError
from storage.stores.base import Store
from storage.streams.log import LogReader
from storage.streams.record import Record
from storage.streams.stream import read_part

_MAX_CACHED = 8


class StreamIndex:
    """The data records of the stream in the folder `path` that `update` has read so far."""

    def __init__(self, store: Store, path: str, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self.records: list[Record] = []
        self._first_rows: list[int] = []
        self._log = LogReader(store, path)

    def update(self, problems: list[str]) -> None:
        """Reads new records. A damaged record is added to `problems` and hides later records."""
        try:
            while (record := self._log.next()) is not None:
                if record.kind == "data":
                    self.records.append(record)
                    self._first_rows.append(record.first_row_id)
        except StorageError as error:
            problems.append(str(error))

    def record_of(self, row_id: int) -> Record | None:
        """Returns the part that contains the row; None if no indexed part does."""
        i = bisect_right(self._first_rows, row_id) - 1
        if i < 0 or row_id >= self.records[i].first_row_id + self.records[i].rows:
            return None
        return self.records[i]

    def of_step(self, incarnation: int, policy_version: int) -> list[Record]:
        """Returns the parts that may contain rows of the step in which this incarnation made the version."""
        return [
            record
            for record in self.records
            if record.incarnation == incarnation
            and record.min_policy_version <= policy_version <= record.max_policy_version
        ]


class PartReader:
    """Reads parts of the streams in `store` and caches the last few, as neighbouring groups often share a part."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._indexes: dict[str, StreamIndex] = {}
        self._cached = lru_cache(_MAX_CACHED)(self._read)

    def index(self, path: str, schema: pa.Schema, problems: list[str]) -> StreamIndex:
        """Returns the updated index of the stream; read errors are added to `problems`."""
        if path not in self._indexes:
            self._indexes[path] = StreamIndex(self._store, path, schema)
        self._indexes[path].update(problems)
        return self._indexes[path]

    def read(self, stream: StreamIndex, record: Record) -> pa.Table:
        """Reads all columns of a part. Raises like `storage.streams.stream.read_part`."""
        return self._cached(stream.path, record.part)

    def try_read(self, stream: StreamIndex, record: Record, problems: list[str]) -> pa.Table | None:
        """Reads a part; if it can't be read, returns None and adds the error to `problems`."""
        try:
            return self.read(stream, record)
        except StorageError as error:
            problems.append(str(error))
            return None

    def part_of(self, path: str, schema: pa.Schema, row_id: int, problems: list[str]) -> tuple[Record, pa.Table] | None:
        """Reads the part that contains a row; None if no readable part does."""
        stream = self.index(path, schema, problems)
        record = stream.record_of(row_id)
        table = None if record is None else self.try_read(stream, record, problems)
        return None if record is None or table is None else (record, table)

    def _read(self, path: str, part: int) -> pa.Table:
        stream = self._indexes[path]
        return read_part(self._store, path, stream.schema, stream.records[part])
