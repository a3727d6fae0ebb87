"""Single parts of streams, by the rows they hold: an index that grows with the log, and the few read last.

║ log ║ ─► StreamIndex: first row_id, versions ─► record ─► PartReader: verified table, kept while others are few
"""

from bisect import bisect_right

import pyarrow as pa

from storage.errors import StorageError
from storage.log import LogReader
from storage.record import Record
from storage.store import Store
from storage.stream import read_part

_PARTS_KEPT = 8


class StreamIndex:
    """The data records of the stream in the folder `path`, as far as `look` has come."""

    def __init__(self, store: Store, path: str, schema: pa.Schema) -> None:
        self.path = path
        self.schema = schema
        self.records: list[Record] = []
        """In order."""
        self._first_rows: list[int] = []
        self._log = LogReader(store, path)

    def look(self, problems: list[str]) -> None:
        """Passes what was committed since; a damaged record is one more problem, and hides what lies behind it."""
        try:
            while (record := self._log.next()) is not None:
                if record.kind == "data":
                    self.records.append(record)
                    self._first_rows.append(record.first_row_id)
        except StorageError as error:
            problems.append(str(error))

    def record_of(self, row_id: int) -> Record | None:
        """The part that has the row; None where none of those known has it."""
        i = bisect_right(self._first_rows, row_id) - 1
        if i < 0 or row_id >= self.records[i].first_row_id + self.records[i].rows:
            return None
        return self.records[i]

    def of_step(self, incarnation: int, policy_version: int) -> list[Record]:
        """The parts that may tell of the step with which that trainer made the version."""
        return [
            record
            for record in self.records
            if record.incarnation == incarnation
            and record.min_policy_version <= policy_version <= record.max_policy_version
        ]


class PartReader:
    """Reads parts of the streams in `store`; groups that are read one after the other often lie in the same."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._indexes: dict[str, StreamIndex] = {}
        self._tables: dict[tuple[str, int], pa.Table] = {}

    def index(self, path: str, schema: pa.Schema, problems: list[str]) -> StreamIndex:
        """The stream's index, as of now; what of it can't be read is one more problem."""
        if path not in self._indexes:
            self._indexes[path] = StreamIndex(self._store, path, schema)
        self._indexes[path].look(problems)
        return self._indexes[path]

    def read(self, stream: StreamIndex, record: Record) -> pa.Table:
        """All columns of a part. Raises as `storage.stream.read_part`."""
        key = (stream.path, record.part)
        table = self._tables.pop(key, None)
        if table is None:
            table = read_part(self._store, stream.path, stream.schema, record)
        # What was used last comes last, so the first has waited longest.
        self._tables[key] = table
        while len(self._tables) > _PARTS_KEPT:
            self._tables.pop(next(iter(self._tables)))
        return table
