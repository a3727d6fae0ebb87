"""One writer and one reader of parts of one size, each beside the bound of its store.

    a round    the bound's write ─ StreamWriter.write ─ GroupCommit.append, group by group      in turn
               the bound's read  ─ StreamReader.next  ─ its bytes alone, verified               in turn
    catch-up   read_part ─ StreamReader, which fetches ahead ─ the bound, one or more at once   in turn, object stores

write    validate, encode, checksum, part file, record; durable and visible on return
read     record, part file, checksum, Arrow, validate; the rows are in memory on return
bytes    part file, checksum: the minimum for a verified read

A reader opens each part once, as a new file; the page cache has it, because it was just written.
"""

import functools
import statistics
from collections.abc import Callable
from typing import Any

import pyarrow as pa

from benchmarks.streams.bounds import ObjectBound, bound_of
from benchmarks.streams.rows import GROUP_SIZE, POLICY_VERSION, RESPONSE_TOKENS, VOCAB_SIZE, renumbered, trajectories
from benchmarks.timing import Prepare, in_turn, median_ratio, profile
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file
from storage.streams.group_commit import GroupCommit
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import StreamReader, StreamWriter, read_part

_CATCH_UP_PARTS = 16
_AT_ONCE = 8


def open_writer(store: Store, path: str) -> StreamWriter:
    """A writer with the same validation of rows as a generator's."""
    return StreamWriter(store, path, TRAJECTORY, "benchmark", vocab_size=VOCAB_SIZE, group_size=GROUP_SIZE)


def about(table: pa.Table) -> dict[str, Any]:
    """What a generator records when it commits rows made by `benchmarks.streams.rows`."""
    return {
        "tokens": table.num_rows * RESPONSE_TOKENS,
        "min_policy_version": POLICY_VERSION,
        "max_policy_version": POLICY_VERSION,
        "incarnation": 0,
        "last_group_id": table.column("group_id")[-1].as_py(),
    }


class Parts:
    """The stream at `path`, written in parts of the same `num_rows` rows."""

    def __init__(self, store: Store, path: str, num_rows: int) -> None:
        self._store = store
        self._path = path
        self._table = trajectories(num_rows)
        self._writer = open_writer(store, path)
        self._cursor = LogCursor()
        # The first part also creates the stream's folders.
        first = self.prepare_write()()
        self.data = memoryview(bytes(store.get(f"{path}/{first.file}")))
        """The file of a part."""
        self.bound = bound_of(store, path, self.data)
        """The bound for the same number of bytes."""
        self.clear()

    def prepare_write(self) -> Callable[[], Record]:
        """The commit of the next part in one write."""
        table = renumbered(self._table, self._writer.rows)
        return functools.partial(self._writer.write, table, **about(table))

    def prepare_appends(self) -> Callable[[], None]:
        """The commit of the next part by a group commit, with groups appended one by one."""
        table = renumbered(self._table, self._writer.rows)
        groups = [table.slice(start, GROUP_SIZE) for start in range(0, table.num_rows, GROUP_SIZE)]
        stored = [about(group) for group in groups]
        # The last append reaches max_rows and commits; the other limits are never reached.
        commits = GroupCommit(self._writer, max_rows=table.num_rows, max_bytes=2 * len(self.data), max_seconds=3600)

        def append_all() -> None:
            with commits:
                for group, values in zip(groups, stored, strict=True):
                    commits.append(group, **values)

        return append_all

    def reader(self) -> StreamReader:
        """A fresh reader, before the parts that have not been cleared."""
        return StreamReader(self._store, self._path, TRAJECTORY, self._cursor)

    def prepare_bytes(self) -> Callable[[], memoryview]:
        """Reading the first part's bytes, with length and checksum verified, but not decoded."""
        record = self.reader().next_record()
        assert record is not None
        file = FileRef(path=f"{self._path}/{record.file}", bytes=record.bytes, checksum=record.checksum)
        return functools.partial(get_file, self._store, file)

    def read_alone(self) -> None:
        """Read the parts that have not been cleared, one after another, nothing fetched ahead."""
        records = self.reader()
        while (record := records.next_record()) is not None:
            read_part(self._store, self._path, TRAJECTORY, record)

    def clear(self) -> None:
        """Skip and delete every part written so far, so that the log grows but the folder does not."""
        reader = self.reader()
        while (record := reader.next_record()) is not None:
            self._store.delete(f"{self._path}/{record.file}")
        self._cursor = reader.cursor


def measure_parts(store: Store, path: str, num_rows: int, repeats: int) -> dict[str, Any]:
    """Writes and reads `repeats` parts of `num_rows` rows (and one before, not counted), beside the bound.

    Returns for each contender the median `seconds` a part, and for the stream's the median `share` of the bound's
    speed, with where its time went.
    """
    parts = Parts(store, path, num_rows)
    rounds = [_round(parts, turn) for turn in range(repeats + 1)][1:]
    times = {name: [one[name] for one in rounds] for name in rounds[0]}
    result: dict[str, Any] = {
        "rows": num_rows,
        "bytes": len(parts.data),
        "bound": {"write": parts.bound.write_name, "read": parts.bound.read_name},
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "all_seconds": times,
        "share": {
            "write": median_ratio(times["bound_write"], times["write"]),
            "group_commit": median_ratio(times["bound_write"], times["group_commit"]),
            "bytes": median_ratio(times["bound_read"], times["bytes"]),
            "read": median_ratio(times["bound_read"], times["read"]),
        },
        "profile": _profile(parts, repeats),
    }
    if isinstance(parts.bound, ObjectBound):
        result["catch_up_seconds"] = _catch_up(parts, parts.bound, repeats)
    return result


def _round(parts: Parts, turn: int) -> dict[str, float]:
    writes: dict[str, Prepare] = {
        "bound_write": lambda: parts.bound.write,
        "write": parts.prepare_write,
        "group_commit": parts.prepare_appends,
    }
    reads: dict[str, Prepare] = {
        "bound_read": lambda: parts.bound.read,
        "bytes": parts.prepare_bytes,
        "read": lambda: parts.reader().next,
    }
    times = in_turn(writes, turn) | in_turn(reads, turn)
    parts.bound.clear()
    parts.clear()
    return times


def _profile(parts: Parts, repeats: int) -> dict[str, dict[str, float]]:
    """Shares of the time of writes, group commits and reads, by function."""
    # Prepared one by one: each part is numbered to follow the one before.
    writes = profile(parts.prepare_write() for _ in range(repeats))
    commits = profile(parts.prepare_appends() for _ in range(repeats))
    reads = profile(parts.reader().next for _ in range(repeats))
    parts.clear()
    return {"write": writes, "group commit": commits, "read": reads}


def _catch_up(parts: Parts, bound: ObjectBound, repeats: int) -> dict[str, float]:
    """Median seconds a part, for a reader that comes late and reads many in a row."""
    for _ in range(_CATCH_UP_PARTS):
        parts.prepare_write()()
    contenders: dict[str, Prepare] = {
        "get_alone": lambda: functools.partial(bound.read_many, _CATCH_UP_PARTS, 1),
        "get_at_once": lambda: functools.partial(bound.read_many, _CATCH_UP_PARTS, _AT_ONCE),
        "alone": lambda: parts.read_alone,
        "ahead": lambda: functools.partial(_read_all, parts.reader()),
    }
    rounds = [in_turn(contenders, turn) for turn in range(repeats)]
    parts.clear()
    return {name: statistics.median(one[name] for one in rounds) / _CATCH_UP_PARTS for name in contenders}


def _read_all(reader: StreamReader) -> None:
    while reader.next() is not None:
        pass
