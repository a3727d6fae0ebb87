"""A part found in a long stream without reading the stream, and the older rows of a stream merged into few parts.

    ║ metrics/train-0 ║         part 0 … 255 │ part 256 … 511 │ 512 │ 513 │ …      small parts, about one a second
    ║ merged_metrics/train-0 ║  part 0       │ part 1         │                    the same rows in the same order
    MergedReader                └───────────────────────────► └───────────────►

Row n of the one is row n of the other, so the number of merged rows says where a reader continues in the stream. The
stream stays as it is: a reader that can't read the merged rows reads those of the stream.
"""

from bisect import bisect_left
from collections.abc import Callable, Iterator
from itertools import islice

import pyarrow as pa

from storage import layout
from storage.errors import NotInStore, StreamCorrupt, damaged_record
from storage.stores.base import Store
from storage.streams.files import Source
from storage.streams.log import LogCursor
from storage.streams.record import Record, decode
from storage.streams.stream import Part, StreamReader, StreamWriter, UnreadablePart

EVERY = 256
"""Parts that are merged into one."""


class PartFinder:
    """Finds parts of the log in the folder `path` by a property that rises along the log.

    Records are numbered without gaps, so about 2 log2(n) of them are read, and each once.
    """

    def __init__(self, source: Source, path: str) -> None:
        self._source = source
        self._path = path
        self._known: dict[int, Record] = {}

    def first(self, is_reached: Callable[[Record], bool]) -> Record | None:
        """The first data record for which `is_reached`, as for all later ones; None if there is none yet.

        Raises StreamCorrupt.
        """

        def is_found(seq: int) -> bool:
            try:
                return (record := self._at(seq)) is None or is_reached(record)
            except StreamCorrupt:
                # It hides those behind it, as for a reader of the whole log.
                return True

        end = 1
        while not is_found(end):
            end *= 2
        return self._at(bisect_left(range(end), True, key=is_found))

    def _at(self, seq: int) -> Record | None:
        """The first data record that has this number or a higher one."""
        while seq not in self._known or self._known[seq].kind != "data":
            file = f"{self._path}/{layout.record(seq)}"
            try:
                record = decode(bytes(self._source.get(file)), file)
            except NotInStore:
                return None
            if record.seq != seq:
                raise damaged_record(file, f"the record says it is number {record.seq}, expected {seq}")
            self._known[seq] = record
            seq += record.kind != "data"
        return self._known[seq]


def before(record: Record) -> LogCursor:
    """The position before a data record, without the totals of tokens and versions."""
    return LogCursor(seq=record.seq, prev=record.prev, epoch=record.epoch, part=record.part, rows=record.first_row_id)


def reader_after(store: Store, path: str, schema: pa.Schema, rows: int) -> StreamReader:
    """A reader of the stream in the folder `path` behind its first `rows` rows, which end a part.

    The rows have no row_id. Raises StreamCorrupt.
    """
    if rows == 0:
        return StreamReader(store, path, schema)
    last = PartFinder(store, path).first(lambda record: record.first_row_id + record.rows >= rows)
    if last is None or last.first_row_id + last.rows != rows:
        raise StreamCorrupt(path, f"no part of it ends with row {rows - 1}, the last one that was merged")
    reader = StreamReader(store, path, schema, before(last))
    reader.next_record()
    return reader


def merge_parts(store: Store, path: str, merged: str, schema: pa.Schema, writer: str) -> None:
    """Merges the parts of the stream in the folder `path` that were not merged yet, `EVERY` at a time.

    Raises StreamCorrupt if one of them can't be read: they stay as they are. Of two processes that merge at once, one
    is Fenced.
    """
    stream = StreamWriter(store, merged, schema, writer)
    parts = iter(reader_after(store, path, schema, stream.rows).next, None)
    while len(tables := [part.table for part in islice(parts, EVERY)]) == EVERY:
        stream.write(pa.concat_tables(tables), tokens=0)


class MergedReader:
    """Reads the stream in the folder `path` from its start, its older rows from the stream `merged`."""

    def __init__(self, store: Store, path: str, merged: str, schema: pa.Schema) -> None:
        self._store = store
        self._path = path
        self._schema = schema
        self._merged = StreamReader(store, merged, schema)
        self._rows = 0
        self._rest: StreamReader | None = None
        """The reader behind the merged rows."""

    def each(self) -> Iterator[Part | UnreadablePart]:
        """Yields what `StreamReader.each` does, in larger parts."""
        if self._rest is None:
            for part in self._readable_merged():
                self._rows += part.record.rows
                yield part
            self._rest = reader_after(self._store, self._path, self._schema, self._rows)
        yield from self._rest.each()

    def readable(self) -> Iterator[Part]:
        """Yields the parts of `each` that can be read."""
        return (part for part in self.each() if isinstance(part, Part))

    def _readable_merged(self) -> Iterator[Part]:
        """The merged parts before the first that is damaged: its rows are still in the stream itself."""
        try:
            yield from iter(self._merged.next, None)
        except StreamCorrupt:
            return
