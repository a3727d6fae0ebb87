"""What a run holds, from its commit records. Rows are read only for `first_rows`.

Times are the modification times of the commit records' files.
"""

from dataclasses import dataclass
from typing import Any

from millrace.errors import InputError
from millrace.maintenance.listing import Contents, Kind, StoredStream, run_id
from storage import layout
from storage.checkpoints import Checkpoint
from storage.errors import PartCorrupt, StreamCorrupt
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.record import NO_VERSION
from storage.streams.stream import read_part, read_removed

FLOW: tuple[Kind, ...] = ("trajectories", "unfinished", "scores", "consumed", "trainer_logprobs", "metrics")
"""Every kind of stream, in the order in which rows flow."""


@dataclass(frozen=True, kw_only=True)
class StreamSummary:
    """One stream, summed over its commit records."""

    name: str
    """Its path below `streams/`."""
    epochs: int
    """Writers it has had."""
    parts: int
    removed_parts: int
    """How many of these, the oldest, lost their rows to gc."""
    rows: int
    tokens: int
    """Response tokens that the rows stand for."""
    bytes: int
    """Size of the parts' files, including removed ones."""
    schema_versions: list[int]
    min_policy_version: int | None
    """Oldest policy version behind the rows; None if none is known."""
    max_policy_version: int | None
    t_first: float | None
    """When the first and the last part were committed, unix seconds; None before the first part."""
    t_last: float | None
    ended: bool
    """Whether the last writer ended the stream."""
    problem: str | None
    """Why the records behind those counted could not be read."""


@dataclass(frozen=True, kw_only=True)
class FilesSummary:
    """One checkpoint, one policy version sent through the store, or one promoted model."""

    step: int
    """Optimizer steps behind it: the policy version."""
    incarnation: int
    """Of the trainer that made it."""
    bytes: int
    present: bool
    """Whether its files exist; gc removes old ones."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A whole run."""

    run_id: str
    run_url: str
    bytes: int
    """Size of all files of the run."""
    streams: list[StreamSummary]
    checkpoints: list[FilesSummary]
    weights: list[FilesSummary]
    promoted: list[FilesSummary]
    """The last one is the current promoted model."""
    staleness: dict[int, int]
    """Trained trajectories by staleness (policy versions), from the latest checkpoint."""
    problems: list[str]
    """Why the logs of checkpoints, weights or promoted models could not be read to their end."""


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The first readable rows of a stream."""

    stream: str
    rows: list[dict[str, Any]]
    """Each by column name."""
    problems: list[str]
    """Parts skipped because their files are damaged, a sentence each."""


def inspect(store: Store) -> RunSummary:
    """Sums up the run at the root of `store`.

    Raises RunMissing, and StreamCorrupt if `run.json` is damaged. Damaged records are listed in the summary.
    """
    contents = Contents(store)
    problems: list[str] = []
    stored: dict[str, list[Checkpoint]] = {}
    for log in layout.FILE_LOGS:
        try:
            stored[log] = contents.checkpoints(log)
        except StreamCorrupt as error:
            stored[log] = []
            problems.append(str(error))
    checkpoints, weights, promoted = (
        [_files_summary(contents, one) for one in stored[log]] for log in layout.FILE_LOGS
    )
    latest = stored[layout.CHECKPOINTS][-1:]
    staleness = latest[0].state["account"]["staleness"] if latest else {}
    streams = sorted(contents.streams, key=lambda stream: FLOW.index(stream.kind))
    return RunSummary(
        run_id=run_id(store),
        run_url=store.url,
        bytes=sum(entry.bytes for entry in contents.entries.values()),
        streams=[_summary(contents, stream) for stream in streams],
        checkpoints=checkpoints,
        weights=weights,
        promoted=promoted,
        staleness={int(versions): count for versions, count in staleness.items()},
        problems=problems,
    )


def first_rows(store: Store, name: str, num_rows: int) -> FirstRows:
    """The first `num_rows` rows of the stream `name` (as in `StreamSummary.name`) that are not removed or damaged.

    Raises InputError if there is no such stream, StreamCorrupt for a damaged record.
    """
    contents = Contents(store)
    streams = {stream.name: stream for stream in contents.streams}
    stream = streams.get(name.removeprefix("streams/").strip("/"))
    if stream is None:
        raise InputError(f"{store.url} has no stream {name!r}: expected one of {', '.join(sorted(streams)) or 'none'}")
    removed = read_removed(store, stream.path)
    rows: list[dict[str, Any]] = []
    problems: list[str] = []
    for record, _ in contents.log(stream.path):
        if len(rows) >= num_rows:
            break
        if record.kind != "data" or record.part < removed:
            continue
        try:
            table = read_part(store, stream.path, stream.schema, record)
        except PartCorrupt as error:
            problems.append(str(error))
            continue
        rows += table.slice(0, num_rows - len(rows)).to_pylist()
    return FirstRows(stream=stream.name, rows=rows, problems=problems)


def _summary(contents: Contents, stream: StoredStream) -> StreamSummary:
    removed = read_removed(contents.store, stream.path)
    head = LogCursor()
    problem: str | None = None
    parts = []
    try:
        for record, cursor in contents.log(stream.path):
            head = cursor
            if record.kind == "data":
                parts.append(record)
    except StreamCorrupt as error:
        problem = str(error)
    listed = [contents.entries.get(f"{stream.path}/{layout.record(record.seq)}") for record in parts]
    times = [entry.t_modified for entry in listed if entry is not None]
    return StreamSummary(
        name=stream.name,
        epochs=head.epoch + 1,
        parts=head.part,
        removed_parts=removed,
        rows=head.rows,
        tokens=head.tokens,
        bytes=sum(record.bytes for record in parts),
        schema_versions=sorted({record.schema_version for record in parts}),
        min_policy_version=None if head.min_policy_version == NO_VERSION else head.min_policy_version,
        max_policy_version=None if head.max_policy_version == NO_VERSION else head.max_policy_version,
        t_first=times[0] if times else None,
        t_last=times[-1] if times else None,
        ended=head.ended,
        problem=problem,
    )


def _files_summary(contents: Contents, stored: Checkpoint) -> FilesSummary:
    return FilesSummary(
        step=stored.step,
        # A checkpoint's log has one epoch per trainer. The other logs store the incarnation of the trainer.
        incarnation=stored.state.get("incarnation", stored.incarnation),
        bytes=sum(ref.bytes for ref in stored.files.values()),
        present=all(ref.path in contents.entries for ref in stored.files.values()),
    )
