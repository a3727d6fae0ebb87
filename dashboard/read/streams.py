"""Streams as columns, updated incrementally; the trainer's streams without rolled-back rows.

    ║ stream ║ ─► Tail: new parts, in batches ─► ConsumedRows    one table
                    │                          └► MetricRows      one table per name
                    └─► an unreadable part is reported and skipped; a damaged record ends the stream

A restarted trainer repeats the steps after its checkpoint. Its predecessor's rows are dropped once the new trainer has
written the same steps, see `millrace.rollouts.lineage.Survivors`. The predecessor's time metrics stay, because that
time was spent.

Columns grow while others read them, without copying rows for each read:

    append ─► [ rows │ new rows │ room   ]      earlier views still show the same rows
    keep   ─► [ chosen rows ]                   in new arrays, so that views are never overwritten
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dashboard.read.model import Columns, Consumed
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.lineage import Survivors
from millrace.runs.history import TIME_METRICS, read_metrics
from storage import layout
from storage.errors import PartRemoved
from storage.schema import CONSUMED, METRIC
from storage.stores.base import Store
from storage.streams.log import LogCursor, backwards
from storage.streams.merged import MergedReader, before
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, stream_head

_BATCH_ROWS = 1 << 16
"""More than the rows of a part, few enough for two copies in memory."""
_MAX_DAMAGED_SHOWN = 5


class GrowingColumns:
    """Numpy columns of equal length, with the given dtypes by name. Not thread-safe, but its views are."""

    def __init__(self, dtypes: Mapping[str, npt.DTypeLike]) -> None:
        self._rows = 0
        self._arrays: dict[str, npt.NDArray[Any]] = {name: np.empty(0, dtype) for name, dtype in dtypes.items()}

    def append(self, columns: Mapping[str, npt.NDArray[Any]]) -> None:
        """Adds rows: one array per column, all of equal length."""
        rows = self._rows + len(next(iter(columns.values())))
        for name, array in self._arrays.items():
            if rows > len(array):
                # Doubling the size copies each row about once on average.
                self._arrays[name] = np.empty(max(rows, 2 * len(array)), array.dtype)
                self._arrays[name][: self._rows] = array[: self._rows]
            self._arrays[name][self._rows : rows] = columns[name]
        self._rows = rows

    def keep(self, chosen: npt.NDArray[np.bool_]) -> None:
        """Drops all rows except the `chosen`, one bool per row."""
        self._arrays = {name: array[: self._rows][chosen] for name, array in self._arrays.items()}
        self._rows = int(np.count_nonzero(chosen))

    def view(self) -> Columns:
        """Returns the current rows, read-only; rows appended later do not appear in it."""
        views = {name: array[: self._rows] for name, array in self._arrays.items()}
        for view in views.values():
            view.flags.writeable = False
        return views


class Codes:
    """Strings as codes of type `dtype`: the strings `first`, then others in order of occurrence."""

    def __init__(self, *first: str, dtype: npt.DTypeLike = np.int8) -> None:
        self.dtype = dtype
        self._codes = {value: code for code, value in enumerate(first)}

    @property
    def values(self) -> tuple[str, ...]:
        return tuple(self._codes)

    def encode(self, column: pa.ChunkedArray) -> npt.NDArray[Any]:
        """Returns the code of each string. Raises OverflowError for more distinct strings than `dtype` can count."""
        values, indices = split(column)
        codes = [self._codes.setdefault(value, len(self._codes)) for value in values]
        return np.array(codes, self.dtype)[indices]


def split(column: pa.ChunkedArray) -> tuple[Sequence[str], npt.NDArray[np.int32]]:
    """Returns the distinct strings of a column, and each row's index into them."""
    encoded = column.combine_chunks().dictionary_encode()
    return encoded.dictionary.to_pylist(), encoded.indices.to_numpy()


class Tail:
    """Follows the stream in the folder `path` by the reader that `open_reader` opens; it may raise StreamCorrupt."""

    def __init__(self, path: str, schema: pa.Schema, open_reader: Callable[[], StreamReader | MergedReader]) -> None:
        self._path = path
        self._schema = schema
        self._open_reader = open_reader
        self._reader: StreamReader | MergedReader | None = None
        self._damaged: list[str] = []
        self._removed = 0

    @property
    def problems(self) -> list[str]:
        """One sentence per skipped part."""
        sentences = self._damaged[:_MAX_DAMAGED_SHOWN]
        if len(self._damaged) > _MAX_DAMAGED_SHOWN:
            more = len(self._damaged) - _MAX_DAMAGED_SHOWN
            sentences.append(f"{self._path}: {more} more parts can't be read; millrace fsck names them")
        if self._removed:
            sentences.append(f"{self._path}: the rows of {self._removed} parts were removed by millrace gc")
        return sentences

    def batches(self) -> Iterator[tuple[Sequence[Record], pa.Table]]:
        """Yields the records of new parts in batches, with the rows of readable parts.

        Raises StreamCorrupt for a damaged record and SchemaUnknown for a part of a newer Millrace, on every call, after
        yielding the parts before it.
        """
        self._reader = self._reader or self._open_reader()
        while True:
            records, tables, rows = list[Record](), [self._schema.empty_table()], 0
            try:
                for part in self._reader.each():
                    records.append(part.record)
                    if isinstance(part, Part):
                        tables.append(part.table)
                        rows += part.table.num_rows
                        if rows >= _BATCH_ROWS:
                            break
                    elif isinstance(part.error, PartRemoved):
                        self._removed += 1
                    else:
                        self._damaged.append(str(part.error))
            finally:
                # Even if the store fails: the reader will not return these parts again.
                if records:
                    yield records, pa.concat_tables(tables)
            if rows < _BATCH_ROWS:
                return


class ConsumedRows:
    """The rows of the consumed stream, updated by `read_new`; of its `newest` versions alone, if given."""

    def __init__(self, store: Store, newest: int | None = None) -> None:
        self._newest = newest

        def open_reader() -> StreamReader:
            start = None if newest is None else _before_newest(store, newest)
            return StreamReader(store, layout.CONSUMED, CONSUMED, start)

        self.tail = Tail(layout.CONSUMED, CONSUMED, open_reader)
        self._survivors = Survivors()
        self._codes = {"outcome": Codes(TRAINED), "source": Codes(), "prompt_id": Codes(dtype=np.int32)}
        dtypes = {field.name: field.type.to_pandas_dtype() for field in CONSUMED}
        self._rows = GrowingColumns({**dtypes, **{name: codes.dtype for name, codes in self._codes.items()}})

    def read_new(self) -> None:
        """Reads new rows. Raises like `Tail.batches`."""
        for records, table in self.tail.batches():
            self._rows.append(
                {
                    name: self._codes[name].encode(table[name]) if name in self._codes else table[name].to_numpy()
                    for name in table.column_names
                }
            )
            # Records also cover unreadable parts.
            incarnations = np.repeat(np.array([record.incarnation for record in records], np.int32), 2)
            versions = [v for record in records for v in (record.min_policy_version, record.max_policy_version)]
            if self._survivors.see_rows(incarnations, np.array(versions, np.int64)):
                _drop_rolled_back(self._rows, self._survivors)
            of_rows = self.columns["policy_version"]
            if self._newest is not None and len(of_rows):
                self._rows.keep(of_rows > of_rows[-1] - self._newest)

    @property
    def columns(self) -> Columns:
        return self._rows.view()

    @property
    def consumed(self) -> Consumed:
        outcomes, sources, prompts = (codes.values for codes in self._codes.values())
        return Consumed(self.columns, outcomes=outcomes, sources=sources, prompts=prompts)


def _before_newest(store: Store, newest: int) -> LogCursor:
    """A position in the consumed stream before the rows of its newest versions."""
    last: int | None = None
    for record in backwards(store, layout.CONSUMED, stream_head(store, layout.CONSUMED)):
        if record.kind == "data":
            last = record.max_policy_version if last is None else last
            if record.max_policy_version <= last - newest:
                return before(record)
    return LogCursor()


class MetricRows:
    """The metrics of one stage replica, updated by `read_new`."""

    def __init__(self, store: Store, stage: str, replica: int) -> None:
        self.tail = Tail(layout.metrics(stage, replica), METRIC, partial(read_metrics, store, stage, replica))
        self._by_name: dict[str, GrowingColumns] = {}
        # Only the trainer is rolled back.
        self._survivors = Survivors() if stage == "train" else None

    def read_new(self) -> None:
        """Reads new rows. Raises like `Tail.batches`."""
        for _, table in self.tail.batches():
            columns = {name: table[name].to_numpy() for name in table.column_names if name != "name"}
            names, indices = split(table["name"])
            for index, name in enumerate(names):
                chosen = indices == index
                if name not in self._by_name:
                    self._by_name[name] = GrowingColumns({key: column.dtype for key, column in columns.items()})
                self._by_name[name].append({key: column[chosen] for key, column in columns.items()})
            if self._survivors is not None:
                of_steps = np.array([not name.startswith(TIME_METRICS) for name in names], np.bool_)[indices]
                if self._survivors.see_rows(columns["incarnation"][of_steps], columns["policy_version"][of_steps]):
                    for name, rows in self._by_name.items():
                        if not name.startswith(TIME_METRICS):
                            _drop_rolled_back(rows, self._survivors)

    @property
    def columns(self) -> Mapping[str, Columns]:
        """Metric name → columns t, incarnation, policy_version, value."""
        return {name: rows.view() for name, rows in self._by_name.items()}


def _drop_rolled_back(rows: GrowingColumns, survivors: Survivors) -> None:
    columns = rows.view()
    rows.keep(survivors.mask(columns["incarnation"], columns["policy_version"]))
