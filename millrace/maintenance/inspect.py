"""A summary of a run's contents, from its commit records. Rows are read only for `first_rows`."""

from dataclasses import dataclass
from typing import Any

from millrace.errors import InputError
from millrace.maintenance.contents import Contents, Kind, StoredStream
from millrace.runs.record import read_run
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.stores.base import Store
from storage.streams.record import NO_VERSION
from storage.streams.stream import Part, StreamReader, read_removed

_FLOW: tuple[Kind, ...] = ("trajectories", "unfinished", "scores", "consumed", "trainer_logprobs", "metrics")
"""Every kind of stream, in the order in which rows flow."""


@dataclass(frozen=True, kw_only=True)
class StreamSummary:
    """One stream, summed over its commit records."""

    name: str
    """Its path below `streams/`."""
    epochs: int
    """Number of writers so far."""
    parts: int
    removed_parts: int
    """How many of these, the oldest, lost their rows to gc; they count in the sums all the same."""
    rows: int
    tokens: int
    """Response tokens that the rows stand for."""
    bytes: int
    min_policy_version: int | None
    max_policy_version: int | None
    """Oldest and newest policy version behind the rows; None if none is known."""
    t_last: float | None
    """When the last part was committed by its record's file, unix seconds; None before the first part."""
    ended: bool
    problem: str | None
    """Why later records could not be read."""


@dataclass(frozen=True, kw_only=True)
class FilesSummary:
    """One checkpoint, one policy version sent through the store, or one promoted model."""

    step: int
    """Its policy version."""
    incarnation: int
    bytes: int
    present: bool
    """Whether its files exist; gc removes old ones."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """A whole run."""

    run_id: str
    run_url: str
    bytes: int
    streams: list[StreamSummary]
    checkpoints: list[FilesSummary]
    weights: list[FilesSummary]
    promoted: list[FilesSummary]
    """The last one is the current promoted model."""
    problems: list[str]
    """Why the logs of checkpoints, weights or promoted models could not be read to their end."""


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The first readable rows of a stream."""

    stream: str
    rows: list[dict[str, Any]]
    problems: list[str]
    """Damaged parts that were skipped, a sentence each."""


def inspect(store: Store) -> RunSummary:
    """Summarizes the run at the root of `store`.

    Raises RunMissing, and StreamCorrupt if `run.json` is damaged. Damaged records are listed in the summary.
    """
    contents = Contents(store)
    problems: list[str] = []
    files = {log: _summarize_files(contents, log, problems) for log in layout.FILE_LOGS}
    return RunSummary(
        run_id=read_run(store)["run_id"],
        run_url=store.url,
        bytes=sum(entry.bytes for entry in contents.entries.values()),
        streams=[_summarize(contents, stream) for kind in _FLOW for stream in contents.of_kind(kind)],
        checkpoints=files[layout.CHECKPOINTS],
        weights=files[layout.WEIGHTS],
        promoted=files[layout.PROMOTED],
        problems=problems,
    )


def first_rows(store: Store, name: str, num_rows: int) -> FirstRows:
    """The first `num_rows` rows of the stream `name` (as in `StreamSummary.name`) that are not removed or damaged.

    Raises InputError if there is no such stream, StreamCorrupt for a damaged record.
    """
    streams = {stream.name: stream for stream in Contents(store).streams}
    stream = streams.get(name.removeprefix("streams/").strip("/"))
    if stream is None:
        raise InputError(f"no stream {name!r}", file=store.url, expected=f"one of {', '.join(sorted(streams))}")
    result = FirstRows(stream=stream.name, rows=[], problems=[])
    for part in StreamReader(store, stream.path, stream.schema).each():
        if isinstance(part, Part):
            result.rows.extend(part.table.slice(0, num_rows - len(result.rows)).to_pylist())
        elif isinstance(part.error, PartCorrupt):
            result.problems.append(str(part.error))
        if len(result.rows) == num_rows:
            break
    return result


def _summarize(contents: Contents, stream: StoredStream) -> StreamSummary:
    log = contents.read_log(stream.path)
    head = log.head
    listed = [contents.entries.get(f"{stream.path}/{layout.record(record.seq)}") for record in log.parts]
    return StreamSummary(
        name=stream.name,
        epochs=head.epoch + 1,
        parts=head.part,
        removed_parts=read_removed(contents.store, stream.path),
        rows=head.rows,
        tokens=head.tokens,
        bytes=sum(record.bytes for record in log.parts),
        min_policy_version=None if head.min_policy_version == NO_VERSION else head.min_policy_version,
        max_policy_version=None if head.max_policy_version == NO_VERSION else head.max_policy_version,
        t_last=max((entry.t_modified for entry in listed if entry is not None), default=None),
        ended=head.ended,
        problem=None if log.damage is None else str(log.damage),
    )


def _summarize_files(contents: Contents, log: str, problems: list[str]) -> list[FilesSummary]:
    try:
        checkpoints = contents.checkpoints(log)
    except StreamCorrupt as error:
        problems.append(str(error))
        return []
    return [
        FilesSummary(
            step=checkpoint.step,
            # A checkpoint's log has one epoch per trainer. The other logs store the incarnation of the trainer.
            incarnation=checkpoint.state.get("incarnation", checkpoint.incarnation),
            bytes=sum(ref.bytes for ref in checkpoint.files.values()),
            present=contents.has_files(checkpoint),
        )
        for checkpoint in checkpoints
    ]
