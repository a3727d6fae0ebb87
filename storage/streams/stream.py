"""Streams of Arrow tables: written in parts, each visible to readers whole or not at all.

    StreamWriter.write(table)  validate ──► seg/<epoch>-<uuid>.arrows ──► log: data record ──► part of the stream
                                            (durable, not yet visible)    (the commit)
    StreamReader.next()        log: next data record ──► get file ─► length, checksum ──► Arrow parses ──► validate

Arrow's own format has no checksum: a flipped bit is parsed into other values, or crashes the parser.
"""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pyarrow as pa

from storage import layout
from storage.errors import NotInStore, PartCorrupt, PartRemoved, SchemaUnknown, StreamCorrupt
from storage.schema import SCHEMA_VERSION, TRAJECTORY, check_columns, in_order
from storage.stores.base import Store
from storage.streams.files import FileRef, Source, get_file, put_file
from storage.streams.log import LogCursor, LogReader, LogWriter, check_no_hole
from storage.streams.prefetch import ReadAhead
from storage.streams.record import NO_VERSION, Record
from storage.streams.sealed import seal, unseal
from storage.validation import validate

_QUIET_SECONDS = 5.0
"""A reader that has waited this long checks for a deleted record, for which it would wait forever."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """One commit and its rows."""

    record: Record
    table: pa.Table
    """The rows, with the columns of the stream's schema; memory may be shared with the store's file."""


@dataclass(frozen=True, kw_only=True, eq=False)
class UnreadablePart:
    """A commit whose rows can't be read."""

    record: Record
    error: PartCorrupt | PartRemoved


class StreamWriter:
    """The one writer of the stream in the folder `path`; opening it fences every older one. Not thread-safe.

    `schema` is one of `storage.schema`; `writer` is a name for people. Unless they are 0, every part promises token ids
    below `vocab_size` and whole groups of `group_size` rows (see `validate`).

    Examples:
        >>> import pyarrow as pa
        >>> from storage.schema import METRIC
        >>> from storage.stores.factory import open_store
        >>> store = open_store("memory://stream-writer")
        >>> row = {"t": 0.0, "incarnation": 0, "policy_version": 3, "name": "loss", "value": 0.5}
        >>> writer = StreamWriter(store, "metrics/train-0", METRIC, writer="train-0")
        >>> writer.write(pa.Table.from_pylist([row], schema=METRIC), tokens=0).rows
        1
        >>> StreamReader(store, "metrics/train-0", METRIC).next().table["value"].to_pylist()
        [0.5]
        >>> store.delete_tree("metrics")
    """

    def __init__(
        self, store: Store, path: str, schema: pa.Schema, writer: str, *, vocab_size: int = 0, group_size: int = 0
    ) -> None:
        self._store = store
        self._path = path
        self._schema = schema
        self._vocab_size = vocab_size
        self._group_size = group_size
        self._log = LogWriter(store, path, writer)

    @property
    def epoch(self) -> int:
        """Number of earlier writers of this stream."""
        return self._log.epoch

    @property
    def rows(self) -> int:
        """Rows committed so far, by earlier writers too: the row_id of a trajectory stream's next row."""
        return self._log.cursor.rows

    @property
    def parts(self) -> int:
        """Parts committed so far, by earlier writers too: the ordinal of the next one."""
        return self._log.cursor.part

    def write(
        self,
        table: pa.Table,
        *,
        tokens: int,
        min_policy_version: int = NO_VERSION,
        max_policy_version: int = NO_VERSION,
        incarnation: int = -1,
        group_ids: Sequence[int] = (),
        last_group_id: int = -1,
        missing_groups: Sequence[int] = (),
    ) -> Record:
        """Commit `table` as the next part; on return it is durable and visible.

        `tokens` counts the response tokens that the rows stand for; the versions bound those behind the rows, of the
        weights that trainer `incarnation` made; they are -1 where unknown. For the groups see `Record`.
        Raises ValueError for an invalid table (see `validate`) and Fenced if a newer writer took over; then nothing
        was committed.
        """
        table = validate(table, self._schema, vocab_size=self._vocab_size, group_size=self._group_size)
        if table.num_rows == 0:
            raise ValueError("a part holds at least one row")
        first_row_id = table.column("row_id")[0].as_py() if "row_id" in table.column_names else self.rows
        if self._schema.equals(TRAJECTORY) and first_row_id != self.rows:
            raise ValueError(f"the first row_id is {first_row_id}, expected {self.rows}, the rows committed so far")
        name = layout.new_part(self.epoch)
        file = put_file(self._store, f"{self._path}/{name}", _to_arrow(table, self._schema))
        return self._log.commit(
            "data",
            file=name,
            bytes=file.bytes,
            checksum=file.checksum,
            rows=table.num_rows,
            first_row_id=first_row_id,
            tokens=tokens,
            min_policy_version=min_policy_version,
            max_policy_version=max_policy_version,
            schema_version=SCHEMA_VERSION,
            incarnation=incarnation,
            group_ids=list(group_ids),
            last_group_id=last_group_id,
            missing_groups=list(missing_groups),
            group_size=self._group_size,
            vocab_size=self._vocab_size,
        )

    def end(self) -> Record:
        """Commit that nothing follows in this epoch. Raises Fenced, and ValueError if called twice."""
        return self._log.commit("end")


class StreamReader:
    """Reads the parts of the stream in the folder `path`, from `cursor` on (default: the start), as they are committed.

    `columns` chooses some of the schema's, in its order (default: all); a part's file is verified whole all the same.
    Opening raises StreamCorrupt if the stream does not lead to `cursor`, and ValueError for an unknown column.
    """

    def __init__(
        self,
        store: Store,
        path: str,
        schema: pa.Schema,
        cursor: LogCursor | None = None,
        *,
        columns: Sequence[str] | None = None,
    ) -> None:
        self._store = store
        self._path = path
        self._schema = schema
        self._columns = columns
        # When a reader that has found nothing since began to wait, monotonic seconds.
        self._quiet_since: float | None = None
        _chosen(schema, columns)
        # A local store needs no prefetching.
        self._source: Source = ReadAhead(store, path) if store.local_path("") is None else store
        self._log = LogReader(self._source, path, cursor)

    @property
    def cursor(self) -> LogCursor:
        """The position after the last part returned. A reader opened there continues without gap or repeat."""
        return self._log.cursor

    @property
    def ended(self) -> bool:
        """Whether the writer ended the stream, and no newer writer has been seen since."""
        return self._log.cursor.ended

    def next(self) -> Part | None:
        """The next part, verified; None while there is none; never blocks.

        Raises StreamCorrupt for a damaged record and what `read_part` raises for a part, and then does not advance.
        """
        entry = self._next_data()
        if entry is None:
            return None
        record, behind = entry
        part = Part(record=record, table=read_part(self._source, self._path, self._schema, record, self._columns))
        self._log.cursor = behind
        return part

    def each(self) -> Iterator[Part | UnreadablePart]:
        """The parts committed so far, in order; those that are damaged or removed come without rows.

        Raises StreamCorrupt for a damaged record and SchemaUnknown; what came before has been given out.
        """
        while True:
            part: Part | UnreadablePart | None
            try:
                part = self.next()
            except (PartCorrupt, PartRemoved) as error:
                record = self.next_record()
                assert record is not None, "its part has just been refused"
                part = UnreadablePart(record=record, error=error)
            if part is None:
                return
            yield part

    def readable(self) -> Iterator[Part]:
        """Yields the parts of `each` that can be read."""
        return (part for part in self.each() if isinstance(part, Part))

    def next_record(self) -> Record | None:
        """Advances like `next` without reading the rows: to count a part, or to skip a damaged one."""
        entry = self._next_data()
        if entry is None:
            return None
        record, self._log.cursor = entry
        return record

    def _next_data(self) -> tuple[Record, LogCursor] | None:
        """The next data record and the cursor after it; other records before it are passed."""
        while (entry := self._log.peek()) is not None:
            self._quiet_since = None
            if entry[0].kind == "data":
                return entry
            self._log.cursor = entry[1]
        now = time.monotonic()
        self._quiet_since = self._quiet_since or now
        if now - self._quiet_since >= _QUIET_SECONDS:
            self._quiet_since = now
            check_no_hole(self._store, self._path, self._log.cursor)
        return None


def read_part(
    source: Source, path: str, schema: pa.Schema, record: Record, columns: Sequence[str] | None = None
) -> pa.Table:
    """The rows that `record` of the stream in the folder `path` committed, verified: all columns, or those chosen.

    Raises PartCorrupt (its file is damaged or missing, or its rows break the schema or the record's promises),
    PartRemoved and SchemaUnknown.
    """
    file = FileRef(path=f"{path}/{record.file}", bytes=record.bytes, checksum=record.checksum)
    if record.schema_version != SCHEMA_VERSION:
        read = f"written with schema version {record.schema_version}"
        raise SchemaUnknown(read, file=file.path, expected=str(SCHEMA_VERSION))
    try:
        data = get_file(source, file, record=record.seq)
    except StreamCorrupt as error:
        if record.part < read_removed(source, path):
            raise PartRemoved(f"the rows of part {record.part} were removed by millrace gc", file=file.path) from error
        raise PartCorrupt(error.file, error.reason, error.record) from error
    try:
        table = _from_arrow(data, schema, record, columns)
        # A checksum shows that the bytes are as written, not that they are valid Arrow.
        return validate(table, table.schema, vocab_size=record.vocab_size, group_size=record.group_size)
    except (pa.ArrowException, ValueError, OSError) as error:
        raise PartCorrupt(file.path, str(error), record.seq) from error


def write_removed(store: Store, path: str, *, parts: int, why: str) -> None:
    """Record that the first `parts` parts of the stream in the folder `path` are gone; `why` is for people."""
    store.put(f"{path}/{layout.REMOVED}", seal({"parts": parts, "t": int(time.time()), "why": why}))


def read_removed(source: Source, path: str) -> int:
    """How many parts of the stream in the folder `path` were removed: those whose ordinal is below it.

    Raises StreamCorrupt for a file that `write_removed` did not write.
    """
    file = f"{path}/{layout.REMOVED}"
    try:
        values = unseal(bytes(source.get(file)))
    except NotInStore:
        return 0
    except ValueError as error:
        raise StreamCorrupt(file, f"it is {error}") from error
    parts = values.get("parts")
    if type(parts) is not int:
        raise StreamCorrupt(file, 'expected a JSON object with a checksum, whose "parts" is a number of parts')
    return parts


def stream_head(store: Store, path: str) -> LogCursor:
    """The cursor after the last commit: it counts parts, rows and tokens, and holds the range of policy versions.

    A live view keeps a `LogReader` and calls its `to_head` instead, which reads only new records.
    """
    return LogReader.at_head(store, path).cursor


def _chosen(schema: pa.Schema, columns: Sequence[str] | None) -> pa.Schema:
    """`schema` with the chosen columns alone."""
    if columns is None:
        return schema
    if unknown := set(columns) - set(schema.names):
        raise ValueError(f"columns {sorted(unknown)} are none of {schema.names}")
    return pa.schema([field for field in schema if field.name in columns])


def _from_arrow(data: memoryview, schema: pa.Schema, record: Record, columns: Sequence[str] | None) -> pa.Table:
    """The chosen columns of a file that `_to_arrow` wrote; shares its memory.

    The values have not been checked yet.
    """
    with pa.ipc.open_stream(pa.py_buffer(data)) as stream:
        check_columns(stream.schema, schema)
        # Columns that were not chosen cost nothing here: they are addresses in `data`.
        table = stream.read_all()
    if table.num_rows != record.rows:
        raise ValueError(f"the file has {table.num_rows} rows, expected {record.rows}")
    chosen = _chosen(schema, columns)
    return table if table.schema.equals(chosen, check_metadata=True) else in_order(table, chosen)


def _to_arrow(table: pa.Table, schema: pa.Schema) -> memoryview:
    """`table`, as `validate` returns it, in Arrow's IPC stream format, under `schema` with its documentation."""
    documented = pa.Table.from_arrays(table.columns, schema=schema)
    size = pa.MockOutputStream()
    _write_arrow(documented, size)
    # Measure first and allocate once: a growing buffer takes 50 % longer.
    buffer = pa.allocate_buffer(size.size())
    _write_arrow(documented, pa.FixedSizeBufferWriter(buffer))
    return memoryview(buffer)


def _write_arrow(table: pa.Table, sink: pa.NativeFile) -> None:
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
