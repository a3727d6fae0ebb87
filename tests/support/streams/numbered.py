"""Rows that are numbered 0, 1, 2 …: whatever is lost, repeated or out of order shows."""

import pyarrow as pa

from storage.schema import METRIC
from storage.stores.base import Store
from storage.streams.stream import StreamReader

PATH = "s"
"""The stream they lie in."""


def numbered(first: int, rows: int, name: str = "row") -> pa.Table:
    """`rows` rows of METRIC whose policy_version is their number, from `first` on."""
    columns = {
        "t": [0.0] * rows,
        "incarnation": [0] * rows,
        "policy_version": list(range(first, first + rows)),
        "name": [name] * rows,
        "value": [number / 8 for number in range(first, first + rows)],
    }
    return pa.table({column: pa.array(values, METRIC.field(column).type) for column, values in columns.items()})


def open_reader(store: Store) -> StreamReader:
    """A reader at the start of the stream of numbered rows."""
    return StreamReader(store, PATH, METRIC)


def take_numbers(reader: StreamReader) -> list[int]:
    """The numbers of every row that the reader has not returned yet."""
    return [number for part in iter(reader.next, None) for number in part.table["policy_version"].to_pylist()]
