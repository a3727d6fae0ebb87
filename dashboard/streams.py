"""What is new in a stream, as columns; and of the trainer's streams, without what was rolled back.

    ║ stream ║ ─► Tail: new parts, some at a time ─► ConsumedRows    one table
                    │                             └► MetricRows      a table a name
                    └─► what can't be read: a sentence, and on to the next part; after a damaged record, no further

A trainer that is started anew repeats the steps behind its checkpoint. What its predecessor said of them is forgotten
once the new one says the same: see `millrace.consumed`. What the predecessor's time went into stays: it was spent.
"""

from collections.abc import Iterator, Mapping, Sequence

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dashboard.columns import Codes, GrowingColumns, split
from dashboard.data import Columns
from millrace.consumed import TRAINED, holds, until
from storage import layout
from storage.errors import PartCorrupt, PartRemoved
from storage.record import Record
from storage.schema import CONSUMED, METRIC
from storage.store import Store
from storage.stream import Part, StreamReader

_BATCH_ROWS = 1 << 16
"""More than a part holds, few enough to be in memory twice."""
_DAMAGED_SHOWN = 5
"""Of a disk that is dying, nobody wants to read of every part."""
_OF_TIME = ("lane/", "total/")
"""How names of metrics begin that are of a process and its time, not of a policy version."""


class Tail:
    """The stream in the folder `path`, part by part as it grows."""

    def __init__(self, store: Store, path: str, schema: pa.Schema) -> None:
        self._path = path
        self._schema = schema
        self._reader = StreamReader(store, path, schema)
        self._damaged: list[str] = []
        self._removed = 0

    @property
    def problems(self) -> list[str]:
        """A sentence for each part that was passed without being read."""
        found = self._damaged[:_DAMAGED_SHOWN]
        if len(self._damaged) > _DAMAGED_SHOWN:
            more = len(self._damaged) - _DAMAGED_SHOWN
            found.append(f"{self._path}: {more} more parts can't be read; millrace fsck names them")
        if self._removed:
            found.append(f"{self._path}: the rows of {self._removed} parts were removed by millrace gc")
        return found

    def batches(self) -> Iterator[tuple[Sequence[Record], pa.Table]]:
        """What is new: the records of some parts, and the rows of those among them that can be read.

        Raises StreamCorrupt for a damaged record and SchemaUnknown for a newer Millrace's part, each time: here the
        stream ends. What was read before them has been given out.
        """
        while True:
            records, tables, rows = list[Record](), [self._schema.empty_table()], 0
            try:
                while rows < _BATCH_ROWS and (found := self._next()) is not None:
                    records.append(found.record if isinstance(found, Part) else found)
                    if isinstance(found, Part):
                        tables.append(found.table)
                        rows += found.table.num_rows
            finally:
                # Also where the store fails: these parts are passed, and will not come again.
                if records:
                    yield records, pa.concat_tables(tables)
            if rows < _BATCH_ROWS:
                return

    def _next(self) -> Part | Record | None:
        try:
            return self._reader.next()
        except PartRemoved:
            record = self._reader.next_record()
            self._removed += 1
        except PartCorrupt as error:
            record = self._reader.next_record()
            self._damaged.append(str(error))
        return record


class _Incarnations:
    """The trainers that a stream has rows of, and what holds of each."""

    def __init__(self) -> None:
        self._spans: dict[int, tuple[int, int]] = {}

    def see(self, incarnations: npt.NDArray[np.int32], policy_versions: npt.NDArray[np.int64]) -> bool:
        """Takes note of rows, in their stream's order. Whether earlier rows may have been rolled back by them."""
        new = False
        for incarnation in np.unique(incarnations).tolist():
            versions = policy_versions[incarnations == incarnation]
            new |= incarnation not in self._spans
            first, newest = self._spans.get(incarnation, (int(versions[0]), -1))
            self._spans[incarnation] = (first, max(newest, int(versions.max())))
        return new and len(self._spans) > 1

    def keep(self, rows: GrowingColumns) -> None:
        """Forgets those rows that were rolled back."""
        # Of an incarnation, its first and its newest row say all that matters here.
        spans = np.array(list(self._spans.values()), np.int64).reshape(-1)
        newest = until(np.repeat(np.array(list(self._spans), np.int32), 2), spans)
        columns = rows.view()
        rows.keep(holds(columns["incarnation"], columns["policy_version"], newest))


class ConsumedRows:
    """What became of each trajectory that the trainer took, kept up to date."""

    def __init__(self, store: Store) -> None:
        self._tail = Tail(store, layout.CONSUMED, CONSUMED)
        self._incarnations = _Incarnations()
        self._outcomes = Codes(TRAINED)
        dtypes = {field.name: field.type.to_pandas_dtype() for field in CONSUMED}
        self._rows = GrowingColumns({**dtypes, "outcome": np.int8})

    def read_new(self) -> None:
        """Raises StreamCorrupt or SchemaUnknown where the stream can't be read any further."""
        for records, table in self._tail.batches():
            self._rows.append(
                {
                    name: self._outcomes.encode(table[name]) if name == "outcome" else table[name].to_numpy()
                    for name in table.column_names
                }
            )
            # By the records: they also tell of parts that can't be read.
            incarnations = np.repeat(np.array([record.incarnation for record in records], np.int32), 2)
            versions = [v for record in records for v in (record.min_policy_version, record.max_policy_version)]
            if self._incarnations.see(incarnations, np.array(versions, np.int64)):
                self._incarnations.keep(self._rows)

    @property
    def columns(self) -> Columns:
        """`storage.schema.CONSUMED`, in stream order, without what was rolled back; `outcome` as codes."""
        return self._rows.view()

    @property
    def outcomes(self) -> tuple[str, ...]:
        """What the codes stand for; 0 is `trained`."""
        return self._outcomes.values

    @property
    def problems(self) -> list[str]:
        """A sentence for each part that could not be read."""
        return self._tail.problems


class MetricRows:
    """What one stage replica measured, kept up to date."""

    def __init__(self, store: Store, stage: str, replica: int) -> None:
        self._tail = Tail(store, layout.metrics(stage, replica), METRIC)
        self._by_name: dict[str, GrowingColumns] = {}
        # The other stages repeat nothing: what they measured, they did.
        self._incarnations = _Incarnations() if stage == "train" else None

    def read_new(self) -> None:
        """Raises StreamCorrupt or SchemaUnknown where the stream can't be read any further."""
        for _, table in self._tail.batches():
            columns = {name: table[name].to_numpy() for name in table.column_names if name != "name"}
            names, places = split(table["name"])
            for place, name in enumerate(names):
                chosen = places == place
                if name not in self._by_name:
                    self._by_name[name] = GrowingColumns({key: column.dtype for key, column in columns.items()})
                self._by_name[name].append({key: column[chosen] for key, column in columns.items()})
            if self._incarnations is not None:
                of_steps = np.array([not name.startswith(_OF_TIME) for name in names], np.bool_)[places]
                self._forget(self._incarnations, {key: column[of_steps] for key, column in columns.items()})

    def _forget(self, incarnations: _Incarnations, new: Columns) -> None:
        if incarnations.see(new["incarnation"], new["policy_version"]):
            for name, rows in self._by_name.items():
                if not name.startswith(_OF_TIME):
                    incarnations.keep(rows)

    @property
    def columns(self) -> Mapping[str, Columns]:
        """By name: t, incarnation, policy_version, value."""
        return {name: rows.view() for name, rows in self._by_name.items()}

    @property
    def problems(self) -> list[str]:
        """A sentence for each part that could not be read."""
        return self._tail.problems
