"""A run as Parquet, for analysis: each trajectory with its score and its teacher's log-probabilities, and every metric.

    ║ trajectories/<g> ║ part k ──────────────────┐
                                                  ├─► row by row ─► trajectories-00000.parquet, -00001, …
    ║ <pool>/<g>/<k mod S>-of-S ║ part ───────────┘    (zstd, row groups, files of bounded size)
    ║ consumed ║ ───────────────────────────────────► consumed-00000.parquet, …
    ║ metrics/<stage>-<r> ║ ────────────────────────► metrics-00000.parquet, …

The files are a copy, written anew each time. Unreadable parts are reported and left out.
"""

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import pyarrow as pa
import pyarrow.parquet as pq

from configs.stored import AnnotationKind, AnnotatorPools, kind_of
from millrace.maintenance.contents import Contents, StoredStream, run_annotators
from millrace.rollouts.scored_group import merge_annotations
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.schema import ANNOTATIONS, CONSUMED, METRIC, SCORE, TEACHER, TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import Part, StreamReader, UnreadablePart

FILE_BYTES = 256 * 2**20
"""A file is closed once its rows take this much memory as Arrow; compressed they take less."""
_ROW_GROUP_ROWS = 4096

_SCORES = [column.with_nullable(True) for column in SCORE if column.name != "row_id"]
_TAUGHT = [column.with_nullable(True) for column in TEACHER if column.name.startswith("teacher_")]
_ANNOTATED: dict[AnnotationKind, list[pa.Field]] = {"scores": _SCORES, "teachers": _TAUGHT}
SCORED: pa.Schema = pa.schema([*TRAJECTORY, *_SCORES, *_TAUGHT])
"""Columns of the trajectories' files. Those of the score are null where a row has none, and so are the teacher's."""
_STAGE = [
    pa.field("stage", pa.string(), nullable=False, metadata={"doc": "which stage measured it"}),
    pa.field("replica", pa.int32(), nullable=False, metadata={"doc": "which process of that stage, from 0"}),
]
MEASURED: pa.Schema = pa.schema([*METRIC, *_STAGE])
"""Columns of the metrics' files."""


@dataclass(kw_only=True)
class Compacted:
    """The files written, and the rows left out."""

    files: dict[str, int] = field(default_factory=dict)
    """Path, relative to the store it was written to → number of rows."""
    rows: int = 0
    """Trajectories written."""
    missing_rows: int = 0
    """Trajectories left out because gc removed them, or because their file is damaged (see `problems`)."""
    problems: list[str] = field(default_factory=list)
    """Unreadable parts and streams, a sentence each."""


def compact(store: Store, out: Store | None = None, *, file_bytes: int = FILE_BYTES) -> Compacted:
    """Writes the run at the root of `store` to the root of `out`, or to the run's own folder `parquet/`.

    Replaces the files of an earlier call there, each atomically, and deletes those beyond the new number.
    Raises RunMissing, and SchemaUnknown if a newer Millrace wrote a part.
    """
    contents = Contents(store)
    target, folder = (store, f"{layout.PARQUET}/") if out is None else (out, "")
    done = Compacted()
    consumed, metrics = contents.of_kind("consumed"), contents.of_kind("metrics")
    for name, schema, tables in (
        ("trajectories", SCORED, _scored_tables(contents, done)),
        ("consumed", CONSUMED, (table for stream in consumed for table in _tables(store, stream, done))),
        ("metrics", MEASURED, (_with_stage(t, stream) for stream in metrics for t in _tables(store, stream, done))),
    ):
        files = _write(target, f"{folder}{name}", schema, _batches(tables, file_bytes))
        for path in target.list(folder.rstrip("/")):
            if re.fullmatch(rf"{folder}{name}-\d{{5}}\.parquet", path) and path not in files:
                target.delete(path)
        done.files |= files
    return done


def _write(store: Store, name: str, schema: pa.Schema, batches: Iterable[pa.Table]) -> dict[str, int]:
    """Writes each batch as a file `<name>-00000.parquet` and so on; returns the rows of each."""
    files = {}
    for number, table in enumerate(batches):
        sink = pa.BufferOutputStream()
        pq.write_table(table.cast(schema), sink, compression="zstd", row_group_size=_ROW_GROUP_ROWS)
        path = f"{name}-{number:05d}.parquet"
        store.put(path, memoryview(sink.getvalue()))
        files[path] = table.num_rows
    return files


def _batches(tables: Iterable[pa.Table], file_bytes: int) -> Iterator[pa.Table]:
    """Concatenates tables until they have at least `file_bytes`; the last batch may have fewer."""
    batch: list[pa.Table] = []
    for table in tables:
        batch.append(table)
        if sum(table.nbytes for table in batch) >= file_bytes:
            yield pa.concat_tables(batch)
            batch = []
    if batch:
        yield pa.concat_tables(batch)


def _scored_tables(contents: Contents, done: Compacted) -> Iterator[pa.Table]:
    """The readable trajectories of each generator, part by part, with their annotations."""
    store = contents.store
    pools = run_annotators(store)
    for stream in contents.of_kind("trajectories"):
        parts = {
            pool: [
                _parts(store, layout.annotations(pool, stream.generator, s, count), ANNOTATIONS[kind_of(pool)], done)
                for s in range(count)
            ]
            for pool, count in pools.replicas.items()
        }
        for part in _parts(store, stream.path, TRAJECTORY, done):
            annotations = {
                pool: next(of_pool[layout.annotator_of_part(part.record.part, len(of_pool))], None)
                for pool, of_pool in parts.items()
            }
            if isinstance(part, UnreadablePart):
                done.missing_rows += part.record.rows
                continue
            table = part.table
            done.rows += table.num_rows
            for kind, columns in _ANNOTATED.items():
                of_kind = {pool: annotations[pool] for pool in pools.of_kind(kind)}
                merged = _merged(part, of_kind, pools, stream, done)
                for column in columns:
                    values = pa.nulls(table.num_rows, column.type) if merged is None else merged[column.name]
                    table = table.append_column(column, values)
            yield table


def _merged(
    trajectories: Part,
    annotations: Mapping[str, Part | UnreadablePart | None],
    pools: AnnotatorPools,
    stream: StoredStream,
    done: Compacted,
) -> pa.Table | None:
    """The annotations of a part by pools of one kind; None if those of a pool are missing, damaged, or of other rows,
    and without a pool."""
    parts = {pool: part for pool, part in annotations.items() if isinstance(part, Part)}
    if not parts or len(parts) < len(annotations):
        return None
    kind = kind_of(next(iter(parts)))
    try:
        return merge_annotations(trajectories, parts, pools, stream.generator)[kind]
    except StreamCorrupt:
        part = trajectories.record.part
        done.problems.append(f"{stream.name}: the {kind} of part {part} belong to other rows and were left out")
        return None


def _with_stage(table: pa.Table, stream: StoredStream) -> pa.Table:
    stage, _, replica = stream.path.rpartition("/")[2].rpartition("-")
    for column, value in zip(_STAGE, (stage, int(replica)), strict=True):
        table = table.append_column(column, pa.repeat(pa.scalar(value, column.type), table.num_rows))
    return table


def _tables(store: Store, stream: StoredStream, done: Compacted) -> Iterator[pa.Table]:
    return (part.table for part in _parts(store, stream.path, stream.schema, done) if isinstance(part, Part))


def _parts(store: Store, path: str, schema: pa.Schema, done: Compacted) -> Iterator[Part | UnreadablePart]:
    """Yields every part of a stream. Damage is added to the problems."""
    try:
        for part in StreamReader(store, path, schema).each():
            if isinstance(part, UnreadablePart) and isinstance(part.error, PartCorrupt):
                done.problems.append(str(part.error))
            yield part
    except StreamCorrupt as error:
        done.problems.append(f"{error}; the rest of this stream was left out")
