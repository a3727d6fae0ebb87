"""A run as Parquet, for analysis: every trajectory with its score in a row, what became of each, every measurement.

    ║ trajectories/<g> ║ part k ──────────────────┐
                                                  ├─► row by row ─► trajectories-00000.parquet, -00001, …
    ║ scores/<reward>/<g>/<k mod S>-of-S ║ part ──┘    (zstd, row groups, files of bounded size)
    ║ consumed ║ ───────────────────────────────────► consumed-00000.parquet, …
    ║ metrics/<stage>-<r> ║ ────────────────────────► metrics-00000.parquet, …

The streams stay the truth: these files are a copy, made anew each time. What can't be read is told and left out.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.care.contents import Contents, StoredStream, run_shape
from storage import layout
from storage.errors import PartCorrupt, PartRemoved, StreamCorrupt
from storage.record import Record
from storage.schema import CONSUMED, METRIC, SCORE, TRAJECTORY
from storage.store import Store
from storage.stream import StreamReader

FILE_BYTES = 256 * 2**20
"""A file is closed once the rows in it take so much as Arrow; compressed it is smaller."""
_ROW_GROUP_ROWS = 4096

_SCORES = [column.with_nullable(True) for column in SCORE if column.name != "row_id"]
SCORED: pa.Schema = pa.schema([*TRAJECTORY, *_SCORES])
"""Columns of the trajectories' files; those of a score are null where the row has none."""
MEASURED: pa.Schema = pa.schema(
    [
        *METRIC,
        pa.field("stage", pa.string(), nullable=False, metadata={"doc": "which stage measured it"}),
        pa.field("replica", pa.int32(), nullable=False, metadata={"doc": "which process of that stage, from 0"}),
    ]
)
"""Columns of the metrics' files."""


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """One Parquet file."""

    path: str
    """Relative to the store it was written to."""
    rows: int
    bytes: int


@dataclass(kw_only=True)
class Compacted:
    """What was written."""

    files: list[WrittenFile] = field(default_factory=list)
    rows: int = 0
    """Trajectories."""
    unscored_rows: int = 0
    """Of these, those without a score."""
    missing_rows: int = 0
    """Trajectories left out because gc removed them, or because their file is damaged (see `problems`)."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, a sentence each."""


def compact(store: Store, out: Store | None = None, *, file_bytes: int = FILE_BYTES) -> Compacted:
    """Writes the run at the root of `store` to the root of `out`, or to the run's own folder `parquet/`.

    Files of an earlier call there are replaced, each atomically, and deleted where there are fewer now.
    Raises RunMissing, and SchemaUnknown where a newer Millrace wrote a part.
    """
    contents = Contents(store)
    place, folder = (store, f"{layout.PARQUET}/") if out is None else (out, "")
    done = Compacted()
    trajectories = _DataSet(place, f"{folder}trajectories", SCORED, file_bytes, done)
    for stream in contents.trajectories():
        for table in _scored(contents, stream, done):
            trajectories.add(table)
    trajectories.finish()
    consumed = _DataSet(place, f"{folder}consumed", CONSUMED, file_bytes, done)
    metrics = _DataSet(place, f"{folder}metrics", MEASURED, file_bytes, done)
    for stream in contents.streams:
        if stream.kind in ("consumed", "metrics"):
            for _, table in _parts(store, stream, done):
                if table is not None and stream.kind == "consumed":
                    consumed.add(table)
                elif table is not None:
                    metrics.add(_measured(table, stream))
    consumed.finish()
    metrics.finish()
    return done


class _DataSet:
    """Files `<name>-00000.parquet` and so on of one schema."""

    def __init__(self, store: Store, name: str, schema: pa.Schema, file_bytes: int, done: Compacted) -> None:
        self._store, self._name, self._schema = store, name, schema
        self._file_bytes, self._done = file_bytes, done
        self._waiting: list[pa.Table] = []
        self._bytes = 0
        self._num_files = 0

    def add(self, table: pa.Table) -> None:
        self._waiting.append(table)
        self._bytes += table.nbytes
        if self._bytes >= self._file_bytes:
            self._write()

    def finish(self) -> None:
        """Writes what waits, and deletes what an earlier call wrote beyond it."""
        if self._waiting:
            self._write()
        written = {file.path for file in self._done.files}
        ours = re.compile(re.escape(self._name) + r"-\d{5}\.parquet")
        for path in self._store.list(self._name.rpartition("/")[0]):
            if ours.fullmatch(path) and path not in written:
                self._store.delete(path)

    def _write(self) -> None:
        table = pa.concat_tables(self._waiting).cast(self._schema)
        sink = pa.BufferOutputStream()
        pq.write_table(table, sink, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        data = memoryview(sink.getvalue())
        path = f"{self._name}-{self._num_files:05d}.parquet"
        self._store.put(path, data)
        self._done.files.append(WrittenFile(path=path, rows=table.num_rows, bytes=len(data)))
        self._num_files += 1
        self._waiting, self._bytes = [], 0


def _scored(contents: Contents, stream: StoredStream, done: Compacted) -> Iterator[pa.Table]:
    """The trajectories of one generator that can be read, part by part, with their scores."""
    assert stream.generator is not None
    shape = run_shape(contents.store)
    sets = contents.scores_of(stream.generator)
    streams = sets.pop((shape.reward, shape.num_scorers), [None])
    done.problems += [f"{stream.name}: its scores by {reward!r} of {num} scorers were left out" for reward, num in sets]
    scores = [iter(()) if one is None else _parts(contents.store, one, done) for one in streams]
    for record, table in _parts(contents.store, stream, done):
        _, score = next(scores[record.part % len(scores)], (None, None))
        if table is None:
            done.missing_rows += record.rows
            continue
        if score is not None and not score["row_id"].equals(table["row_id"]):
            done.problems.append(f"{stream.name}: the scores of part {record.part} are of other rows: left out")
            score = None
        done.rows += table.num_rows
        done.unscored_rows += table.num_rows if score is None else 0
        yield _joined(table, score)


def _joined(table: pa.Table, score: pa.Table | None) -> pa.Table:
    for column in _SCORES:
        values = pa.nulls(table.num_rows, column.type) if score is None else score[column.name]
        table = table.append_column(column, values)
    return table


def _measured(table: pa.Table, stream: StoredStream) -> pa.Table:
    stage, _, replica = stream.path.rpartition("/")[2].rpartition("-")
    columns = {"stage": pa.repeat(stage, table.num_rows), "replica": pa.repeat(int(replica), table.num_rows)}
    for name, values in columns.items():
        table = table.append_column(MEASURED.field(name), values.cast(MEASURED.field(name).type))
    return table


def _parts(store: Store, stream: StoredStream, done: Compacted) -> Iterator[tuple[Record, pa.Table | None]]:
    """Every part of a stream; None for the rows of one that was removed, or is damaged."""
    reader = StreamReader(store, stream.path, stream.schema)
    while True:
        table = None
        try:
            part = reader.next()
            if part is None:
                return
            record, table = part.record, part.table
        except (PartCorrupt, PartRemoved) as error:
            passed = reader.next_record()
            assert passed is not None, "its part has just been refused"
            record = passed
            if isinstance(error, PartCorrupt):
                done.problems.append(str(error))
        except StreamCorrupt as error:
            done.problems.append(f"{error}; what follows in this stream was left out")
            return
        yield record, table
