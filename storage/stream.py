"""Streams of Arrow tables: written in parts, each visible to readers whole or not at all.

    StreamWriter.write(table)  validate ──► seg/<epoch>-<uuid>.arrows ──► log: data record ──► part of the stream
                                            (durable, seen by no one)     (the commit)
    StreamReader.next()        log: next data record ──► get seg ──► length, checksum ──► only then Arrow parses

Arrow's own format has no checksum: a flipped bit is parsed into other values, or crashes the parser.
"""

from dataclasses import dataclass

import pyarrow as pa

from storage import layout
from storage.errors import SchemaUnknown, StreamCorrupt
from storage.files import FileRef, get_file, put_file
from storage.log import LogCursor, LogReader, LogWriter
from storage.record import NO_VERSION, Record
from storage.schema import SCHEMA_VERSION, TRAJECTORY, check_columns, validate
from storage.store import Store


@dataclass(frozen=True, kw_only=True, eq=False)
class Part:
    """The rows of one commit."""

    record: Record
    """What was committed."""
    table: pa.Table
    """The rows, with the columns of the stream's schema; memory may be shared with the store's file."""


class StreamWriter:
    """The one writer of the stream in the folder `path`; opening it ends every older one. Not thread-safe.

    `schema` is one of `storage.schema`; `writer` says who this is, for people.
    """

    def __init__(self, store: Store, path: str, schema: pa.Schema, writer: str) -> None:
        self._store = store
        self._path = path
        self._schema = schema
        self._log = LogWriter(store, path, writer)

    @property
    def epoch(self) -> int:
        """How many writers the stream had before this one."""
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
    ) -> Record:
        """Commit `table` as the next part; it is durable, and visible whole, on return.

        `tokens` counts the response tokens that the rows stand for; the versions bound those behind the rows.
        Raises ValueError for an invalid table (see `validate`) and Fenced if a newer writer took over; then nothing
        was committed.
        """
        validate(table, self._schema)
        if table.num_rows == 0:
            raise ValueError("a part holds at least one row")
        first_row_id = table.column("row_id")[0].as_py() if "row_id" in table.column_names else self.rows
        if self._schema.equals(TRAJECTORY) and first_row_id != self.rows:
            raise ValueError(f"the first row_id is {first_row_id}, expected {self.rows}, the rows committed so far")
        segment = layout.new_segment(self.epoch)
        file = put_file(self._store, f"{self._path}/{segment}", _to_arrow(table, self._schema))
        return self._log.commit(
            "data",
            seg=segment,
            bytes=file.bytes,
            checksum=file.checksum,
            rows=table.num_rows,
            first_row_id=first_row_id,
            tokens=tokens,
            min_policy_version=min_policy_version,
            max_policy_version=max_policy_version,
            schema_version=SCHEMA_VERSION,
        )

    def end(self) -> Record:
        """Commit that nothing follows in this epoch. Raises Fenced, and ValueError if called twice."""
        return self._log.commit("end")


class StreamReader:
    """Reads the parts of the stream in the folder `path`, from `cursor` on (default: the start), as they are committed.

    Opening raises StreamCorrupt if the stream does not lead to `cursor`.
    """

    def __init__(self, store: Store, path: str, schema: pa.Schema, cursor: LogCursor | None = None) -> None:
        self._store = store
        self._path = path
        self._schema = schema
        self._log = LogReader(store, path, cursor)

    @property
    def cursor(self) -> LogCursor:
        """The place behind what was returned last: a reader opened there goes on without a gap or a repeat."""
        return self._log.cursor

    @property
    def ended(self) -> bool:
        """Whether the writer said that nothing follows, and no newer writer has been seen since."""
        return self._log.cursor.ended

    def next(self) -> Part | None:
        """The next part, verified; None while there is none; never blocks.

        Raises StreamCorrupt (damaged, missing, or of another schema) and SchemaUnknown, and then does not advance.
        """
        found = self._next_data()
        if found is None:
            return None
        record, behind = found
        part = Part(record=record, table=self._load(record))
        self._log.cursor = behind
        return part

    def next_record(self) -> Record | None:
        """As `next`, but passes the part without getting its rows: for counting."""
        found = self._next_data()
        if found is None:
            return None
        record, self._log.cursor = found
        return record

    def _next_data(self) -> tuple[Record, LogCursor] | None:
        """Pass what is no data, up to the next data record; that one, and the cursor behind it."""
        while (found := self._log.peek()) is not None:
            if found[0].kind == "data":
                return found
            self._log.cursor = found[1]
        return None

    def _load(self, record: Record) -> pa.Table:
        path = f"{self._path}/{record.seg}"
        if record.schema_version > SCHEMA_VERSION:
            raise SchemaUnknown(
                f"{path}: written with schema version {record.schema_version}, but this Millrace knows {SCHEMA_VERSION}"
            )
        file = FileRef(path=path, bytes=record.bytes, checksum=record.checksum)
        data = get_file(self._store, file, record=record.seq)
        try:
            table = pa.ipc.open_stream(pa.py_buffer(data)).read_all()
            check_columns(table, self._schema)
        except ValueError as error:
            raise StreamCorrupt(path, str(error), record.seq) from error
        if table.num_rows != record.rows:
            raise StreamCorrupt(path, f"the file has {table.num_rows} rows, expected {record.rows}", record.seq)
        return table


def stream_head(store: Store, path: str) -> LogCursor:
    """The cursor behind everything committed so far: how many parts, rows and tokens, of which policy versions.

    For one look. A live view keeps a `LogReader` and calls its `to_head`, which reads only what is new.
    """
    return LogReader(store, path).to_head()


def _to_arrow(table: pa.Table, schema: pa.Schema) -> memoryview:
    """`table` as one record batch in Arrow's IPC stream format, under `schema` with its documentation."""
    documented = pa.Table.from_arrays(table.combine_chunks().columns, schema=schema)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, schema) as writer:
        writer.write_table(documented)
    return memoryview(sink.getvalue())
