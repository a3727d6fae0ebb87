"""A run as Parquet, for analysis: each trajectory with its score, what became of it, and every metric.

    ║ trajectories/<g> ║ part k ──────────────────┐
                                                  ├─► row by row ─► trajectories-00000.parquet, -00001, …
    ║ scores/<reward>/<g>/<k mod S>-of-S ║ part ──┘    (zstd, row groups, files of bounded size)
    ║ consumed ║ ───────────────────────────────────► consumed-00000.parquet, …
    ║ metrics/<stage>-<r> ║ ────────────────────────► metrics-00000.parquet, …

The files are a copy, written anew each time. Unreadable parts are reported and left out.
"""

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.maintenance.listing import Contents, Kind, StoredStream, run_scoring
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.schema import CONSUMED, METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader

FILE_BYTES = 256 * 2**20
"""A file is closed once its rows take this much memory as Arrow; compressed they take less."""
_ROW_GROUP_ROWS = 4096

_SCORES = [column.with_nullable(True) for column in SCORE if column.name != "row_id"]
SCORED: pa.Schema = pa.schema([*TRAJECTORY, *_SCORES])
"""Columns of the trajectories' files. The columns of the score are null where a row has none."""
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
    """How many of these have no score."""
    missing_rows: int = 0
    """Trajectories left out because gc removed them, or because their file is damaged (see `problems`)."""
    problems: list[str] = field(default_factory=list)
    """What could not be read, a sentence each."""


def compact(store: Store, out: Store | None = None, *, file_bytes: int = FILE_BYTES) -> Compacted:
    """Writes the run at the root of `store` to the root of `out`, or to the run's own folder `parquet/`.

    Replaces the files of an earlier call there, each atomically, and deletes those beyond the new number.
    Raises RunMissing, and SchemaUnknown if a newer Millrace wrote a part.
    """
    contents = Contents(store)
    target, folder = (store, f"{layout.PARQUET}/") if out is None else (out, "")
    done = Compacted()
    for name, schema, tables in (
        ("trajectories", SCORED, _scored_tables(contents, done)),
        ("consumed", CONSUMED, (table for _, table in _tables(contents, "consumed", done))),
        ("metrics", MEASURED, (_measured(table, stream) for stream, table in _tables(contents, "metrics", done))),
    ):
        done.files += _write(target, f"{folder}{name}", schema, _batches(tables, file_bytes))
    return done


def _write(store: Store, name: str, schema: pa.Schema, batches: Iterable[pa.Table]) -> list[WrittenFile]:
    """Writes each batch as a file `<name>-00000.parquet` and so on, and deletes further files of an earlier call."""
    files = []
    for number, table in enumerate(batches):
        sink = pa.BufferOutputStream()
        pq.write_table(table.cast(schema), sink, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        data = memoryview(sink.getvalue())
        path = f"{name}-{number:05d}.parquet"
        store.put(path, data)
        files.append(WrittenFile(path=path, rows=table.num_rows, bytes=len(data)))
    written = {file.path for file in files}
    ours = re.compile(re.escape(name) + r"-\d{5}\.parquet")
    for path in store.list(name.rpartition("/")[0]):
        if ours.fullmatch(path) and path not in written:
            store.delete(path)
    return files


def _batches(tables: Iterable[pa.Table], file_bytes: int) -> Iterator[pa.Table]:
    """The tables joined until they have at least `file_bytes`; the last batch may have fewer."""
    waiting: list[pa.Table] = []
    size = 0
    for table in tables:
        waiting.append(table)
        size += table.nbytes
        if size >= file_bytes:
            yield pa.concat_tables(waiting)
            waiting, size = [], 0
    if waiting:
        yield pa.concat_tables(waiting)


def _scored_tables(contents: Contents, done: Compacted) -> Iterator[pa.Table]:
    """The readable trajectories of each generator, part by part, with their scores."""
    trajectories = contents.of_kind("trajectories")
    if not trajectories:
        return
    scoring = run_scoring(contents.store)
    for stream in trajectories:
        sets = contents.scores_of(stream.generator)
        streams = sets.pop(scoring, [None])
        done.problems += [
            f"{stream.name}: its scores by {reward!r} of {num} scorers were left out" for reward, num in sets
        ]
        scores = [iter(()) if one is None else _parts(contents.store, one, done) for one in streams]
        for record, table in _parts(contents.store, stream, done):
            _, score = next(scores[layout.scorer_of_part(record.part, len(scores))], (None, None))
            if table is None:
                done.missing_rows += record.rows
                continue
            if score is not None and not score["row_id"].equals(table["row_id"]):
                done.problems.append(
                    f"{stream.name}: the scores of part {record.part} belong to other rows and were left out"
                )
                score = None
            done.rows += table.num_rows
            done.unscored_rows += table.num_rows if score is None else 0
            yield _joined(table, score)


def _joined(table: pa.Table, score: pa.Table | None) -> pa.Table:
    for column in _SCORES:
        values = pa.nulls(table.num_rows, column.type) if score is None else score[column.name]
        table = table.append_column(column, values)
    return table


def _tables(contents: Contents, kind: Kind, done: Compacted) -> Iterator[tuple[StoredStream, pa.Table]]:
    """The readable parts of all streams of a kind."""
    for stream in contents.of_kind(kind):
        for _, table in _parts(contents.store, stream, done):
            if table is not None:
                yield stream, table


def _measured(table: pa.Table, stream: StoredStream) -> pa.Table:
    stage, _, replica = stream.path.rpartition("/")[2].rpartition("-")
    columns = {"stage": pa.repeat(stage, table.num_rows), "replica": pa.repeat(int(replica), table.num_rows)}
    for name, values in columns.items():
        table = table.append_column(MEASURED.field(name), values.cast(MEASURED.field(name).type))
    return table


def _parts(store: Store, stream: StoredStream, done: Compacted) -> Iterator[tuple[Record, pa.Table | None]]:
    """Every part of a stream; None instead of rows that are removed or damaged."""
    reader = StreamReader(store, stream.path, stream.schema)
    try:
        for part in reader.each():
            if isinstance(part, Part):
                yield part.record, part.table
                continue
            if isinstance(part.error, PartCorrupt):
                done.problems.append(str(part.error))
            yield part.record, None
    except StreamCorrupt as error:
        done.problems.append(f"{error}; the rest of this stream was left out")
