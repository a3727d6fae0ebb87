"""The cost of streams: durable writes and verified reads, each compared with the bound of its store.

    a round   the bound's write ─ StreamWriter.write ─ GroupCommit.append, group by group      in turn
              the bound's read  ─ StreamReader.next  ─ its bytes alone, verified               in turn

    bound     write                        read
    a folder  one file, one write, fsync   memcpy into memory that is already allocated
    s3://     one PUT                      one GET

Trajectories have 1,024 response tokens each. A time is the median over rounds, a share of a bound the median of the
shares within each round. A reader opens each part once; the page cache has it, because it was just written.

    python -m benchmarks.streams [--store URL] [--parts 8 64] [--repeats 15] [--json PATH]

Without `--store`, a temporary folder is used. The bound then depends on the disk that holds it.
"""

import functools
import os
import statistics
import tempfile
import uuid
from collections.abc import Callable
from typing import Any

import numpy as np
import obstore
import pyarrow as pa
from obstore.store import S3Store

from benchmarks.harness import Prepare, finish, make_parser, median_ratio, print_table, time_in_turn, transpose
from benchmarks.trajectories import (
    GROUP_SIZE,
    POLICY_VERSION,
    RESPONSE_TOKENS,
    VOCAB_SIZE,
    make_rows,
    renumber,
    rows_in,
)
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.stores.s3_settings import read_settings
from storage.streams.files import FileRef, get_file
from storage.streams.group_commit import GroupCommit
from storage.streams.log import LogCursor
from storage.streams.stream import StreamReader, StreamWriter

TARGETS = {"trajectories_per_second": 10_000, "write_share": 0.8, "read_share": 0.8}
"""For local stores: a write reaches either the rate or its share of the bound, a read its share of memcpy."""


def main() -> None:
    """Measures, prints the tables and writes the figures as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--store", metavar="URL", help="where to write; everything written is deleted at the end")
    parser.add_argument(
        "--parts", type=float, nargs="+", default=[8, 64], metavar="MB", help="sizes of a part, 10⁶ bytes"
    )
    parser.add_argument("--repeats", type=int, default=15, help="rounds that are counted")
    arguments = parser.parse_args()
    if arguments.repeats < 1 or min(arguments.parts) <= 0:
        parser.error("expected at least one repeat, and parts larger than 0 MB")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        result = measure(arguments.store or folder, arguments.parts, repeats=arguments.repeats)
    _print(result)
    finish(arguments.json, result)


def measure(url: str, megabytes: list[float], *, repeats: int) -> dict[str, Any]:
    """Measures parts of these sizes on the store `url`, in seconds and bytes unless the name has another unit."""
    store = open_store(url)
    folder = f"benchmark-{uuid.uuid4().hex}"
    try:
        parts = [_measure_parts(store, f"{folder}/{size}", rows_in(size), repeats) for size in megabytes]
        result: dict[str, Any] = {"store": store.url, "parts": parts}
        if store.local_path(folder) is not None:
            result["targets"] = targets_met(result)
    finally:
        store.delete_tree(folder)
    return result


def targets_met(result: dict[str, Any]) -> dict[str, bool]:
    """Returns whether the figures of `measure` reach `TARGETS`, by part size."""
    met = {}
    for part in result["parts"]:
        size = _size(part)
        for name in ("write", "group commit"):
            fast = part["rows"] / part["seconds"][name] >= TARGETS["trajectories_per_second"]
            met[f"{name}, {size}"] = fast or part["share"][name] >= TARGETS["write_share"]
        met[f"read, bytes verified, {size}"] = part["share"]["bytes"] >= TARGETS["read_share"]
        met[f"read, values checked too, {size}"] = part["share"]["read"] >= TARGETS["read_share"]
    return met


def _measure_parts(store: Store, path: str, num_rows: int, repeats: int) -> dict[str, Any]:
    """Writes and reads `repeats` parts of `num_rows` rows, and one before that is not counted."""
    parts = _Parts(store, path, num_rows)
    rounds = [parts.run_round(turn) for turn in range(repeats + 1)][1:]
    times = transpose(rounds)
    bounds = {"write": "write bound", "group commit": "write bound", "bytes": "read bound", "read": "read bound"}
    return {
        "rows": num_rows,
        "bytes": parts.num_bytes,
        "seconds": {name: statistics.median(values) for name, values in times.items()},
        "all_seconds": times,
        "share": {name: median_ratio(times[bound], times[name]) for name, bound in bounds.items()},
    }


class _Parts:
    """A stream at `path`, written in parts of the same `num_rows` rows, validated as a generator's."""

    def __init__(self, store: Store, path: str, num_rows: int) -> None:
        self._store = store
        self._path = path
        self._table = make_rows(num_rows)
        self._writer = StreamWriter(store, path, TRAJECTORY, "benchmark", vocab_size=VOCAB_SIZE, group_size=GROUP_SIZE)
        self._cursor = LogCursor()
        # The first part also creates the stream's folders.
        first = self._prepare_write()()
        data = bytes(store.get(f"{path}/{first.file}"))
        self.num_bytes = len(data)
        """Size of a part's file."""
        self._raw_files = f"{path}/raw"
        self._write_bound, self._read_bound = _bounds(store, self._raw_files, data)
        self._clear()

    def run_round(self, turn: int) -> dict[str, float]:
        """Returns the seconds of each contender, once."""
        writes: dict[str, Prepare] = {
            "write bound": lambda: self._write_bound,
            "write": self._prepare_write,
            "group commit": self._prepare_appends,
        }
        reads: dict[str, Prepare] = {
            "read bound": lambda: self._read_bound,
            "bytes": self._prepare_bytes,
            "read": lambda: self._reader().next,
        }
        times = time_in_turn(writes, turn) | time_in_turn(reads, turn)
        self._clear()
        return times

    def _prepare_write(self) -> Callable[[], Any]:
        """Prepares the commit of the next part in one write."""
        table = renumber(self._table, self._writer.rows)
        return functools.partial(self._writer.write, table, **_commit_values(table))

    def _prepare_appends(self) -> Callable[[], None]:
        """Prepares the commit of the next part by a group commit, with groups appended one by one."""
        table = renumber(self._table, self._writer.rows)
        groups = [table.slice(start, GROUP_SIZE) for start in range(0, table.num_rows, GROUP_SIZE)]
        stored = [_commit_values(group) for group in groups]
        # The last append reaches max_rows and commits; the other limits are never reached.
        commits = GroupCommit(self._writer, max_rows=table.num_rows, max_bytes=2 * self.num_bytes, max_seconds=3600)

        def append_all() -> None:
            with commits:
                for group, values in zip(groups, stored, strict=True):
                    commits.append(group, **values)

        return append_all

    def _prepare_bytes(self) -> Callable[[], memoryview]:
        """Prepares reading the first part's bytes, with length and checksum verified, but not decoded."""
        record = self._reader().next_record()
        assert record is not None
        file = FileRef(path=f"{self._path}/{record.file}", bytes=record.bytes, checksum=record.checksum)
        return functools.partial(get_file, self._store, file)

    def _reader(self) -> StreamReader:
        """Returns a reader of the parts that have not been cleared."""
        return StreamReader(self._store, self._path, TRAJECTORY, self._cursor)

    def _clear(self) -> None:
        """Skips and deletes every part written so far, so that the log grows but the folder does not."""
        reader = self._reader()
        while (record := reader.next_record()) is not None:
            self._store.delete(f"{self._path}/{record.file}")
        self._cursor = reader.cursor
        for path in self._store.list(self._raw_files):
            if not path.endswith("kept"):
                self._store.delete(path)


def _commit_values(table: pa.Table) -> dict[str, Any]:
    """Returns the values that a generator records with these rows."""
    return {
        "tokens": table.num_rows * RESPONSE_TOKENS,
        "min_policy_version": POLICY_VERSION,
        "max_policy_version": POLICY_VERSION,
        "incarnation": 0,
        "last_group_id": table.column("group_id")[-1].as_py(),
    }


def _bounds(store: Store, path: str, data: bytes) -> tuple[Callable[[], object], Callable[[], object]]:
    """Returns calls that move `data` to the folder `path` of `store`, and back, with as few calls as possible."""
    folder = store.local_path(path)
    if folder is None:
        client = S3Store.from_url(store.url, config=read_settings(os.environ), client_options={"allow_http": True})
        obstore.put(client, f"{path}/kept", data, use_multipart=False)
        return (
            lambda: obstore.put(client, f"{path}/{uuid.uuid4().hex}", data, use_multipart=False),
            lambda: obstore.get(client, f"{path}/kept").bytes(),
        )
    folder.mkdir(parents=True, exist_ok=True)
    source = np.frombuffer(data, np.uint8).copy()
    target = np.zeros_like(source)

    def write() -> None:
        with (folder / uuid.uuid4().hex).open("xb", buffering=0) as raw:
            # A regular file takes it in one call, short of a full disk.
            written = raw.write(source.data)
            os.fsync(raw.fileno())
        if written != len(source):
            raise OSError(f"{folder}: the disk took {written} of {len(source)} bytes")

    return write, lambda: np.copyto(target, source)


def _print(result: dict[str, Any]) -> None:
    for part in result["parts"]:
        rows = []
        for name, seconds in part["seconds"].items():
            share = part["share"].get(name)
            rows.append(
                [
                    name,
                    f"{1000 * seconds:.2f}",
                    f"{part['bytes'] / seconds / 1e6:,.0f}",
                    f"{part['rows'] / seconds:,.0f}",
                    f"{1000 * seconds / part['rows']:.4f}",
                    "" if share is None else f"{share:.0%}",
                ]
            )
        title = f"Parts of {_size(part)}: {part['rows']} trajectories"
        print_table(title, ("", "ms", "MB/s", "rows/s", "ms/row", "of bound"), rows)


def _size(part: dict[str, Any]) -> str:
    return f"{part['bytes'] / 1e6:.1f} MB"


if __name__ == "__main__":
    main()
