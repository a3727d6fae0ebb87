"""What a run holds, from its commit records; no rows are read, except a stream's first few where they are asked for.

Times are those the store gave to the files of the commit records.
"""

from dataclasses import dataclass, field
from typing import Any

from millrace.care.contents import Contents, StoredFiles, StoredStream, run_id
from millrace.errors import InputError
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.log import LogCursor
from storage.record import NO_VERSION, Record
from storage.store import Store
from storage.stream import read_part, read_removed


@dataclass(kw_only=True)
class StreamSummary:
    """One stream, summed over its commit records."""

    name: str
    """Its path below `streams/`."""
    epochs: int = 0
    """Writers it has had."""
    parts: int = 0
    removed_parts: int = 0
    """Of these, the oldest, whose rows gc removed."""
    rows: int = 0
    tokens: int = 0
    """Response tokens that the rows stand for."""
    bytes: int = 0
    """Size of the parts' files, those removed included."""
    schema_versions: list[int] = field(default_factory=list)
    min_policy_version: int | None = None
    """Oldest policy version behind the rows; None where none is known."""
    max_policy_version: int | None = None
    t_first: float | None = None
    """When the first and the last part were committed, unix seconds; None before the first part."""
    t_last: float | None = None
    ended: bool = False
    """The last writer said that nothing follows."""
    problem: str | None = None
    """Why the records behind those counted could not be read."""


@dataclass(frozen=True, kw_only=True)
class FilesSummary:
    """One checkpoint, one policy version that was sent through the store, or one that was promoted."""

    step: int
    """Optimizer steps behind it: the policy version."""
    incarnation: int
    """Of the trainer that made it."""
    bytes: int
    present: bool
    """Whether its files are there; gc removes those of old ones."""


@dataclass(frozen=True, kw_only=True)
class RunSummary:
    """All of a run."""

    run_id: str
    run_url: str
    bytes: int
    """Size of every file of the run."""
    streams: list[StreamSummary]
    checkpoints: list[FilesSummary]
    weights: list[FilesSummary]
    promoted: list[FilesSummary]
    """The last one is the promoted model."""
    staleness: dict[int, int]
    """Trained rollouts by staleness (policy versions), as the latest checkpoint has it."""
    problems: list[str]
    """Why the logs of checkpoints, weights or promoted models could not be read to their end."""


@dataclass(frozen=True, kw_only=True)
class FirstRows:
    """The first rows of a stream that can be read."""

    stream: str
    rows: list[dict[str, Any]]
    """Each by column name."""
    problems: list[str]
    """Parts that were passed because their files are damaged, a sentence each."""


def inspect(store: Store) -> RunSummary:
    """Sums up the run at the root of `store`. Raises RunMissing; other damage than `run.json`'s is in the summary."""
    contents = Contents(store)
    problems: list[str] = []
    checkpoints, weights, promoted = (_stored(contents, log, problems) for log in layout.FILE_LOGS)
    return RunSummary(
        run_id=run_id(store),
        run_url=store.url,
        bytes=sum(entry.bytes for entry in contents.entries.values()),
        streams=_in_order([_summary(contents, stream) for stream in contents.streams]),
        checkpoints=[_files_summary(contents, stored) for stored in checkpoints],
        weights=[_files_summary(contents, stored) for stored in weights],
        promoted=[_files_summary(contents, stored) for stored in promoted],
        staleness=_staleness(checkpoints),
        problems=problems,
    )


def first_rows(store: Store, name: str, num_rows: int) -> FirstRows:
    """The first `num_rows` rows of the stream `name` (as in `StreamSummary.name`) that are not removed or damaged.

    Raises InputError where there is no such stream, StreamCorrupt for a damaged record.
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
    summary = StreamSummary(name=stream.name, removed_parts=read_removed(contents.store, stream.path))
    try:
        for record, cursor in contents.log(stream.path):
            _add(summary, contents, stream, record, cursor)
    except StreamCorrupt as error:
        summary.problem = str(error)
    return summary


def _in_order(streams: list[StreamSummary]) -> list[StreamSummary]:
    """As rows flow: trajectories, scores, the trainer's, metrics. They were read in another order."""
    flow = ("trajectories", "scores", "consumed", "trainer_logprobs", "metrics")
    return sorted(streams, key=lambda stream: flow.index(stream.name.partition("/")[0]))


def _add(summary: StreamSummary, contents: Contents, stream: StoredStream, record: Record, cursor: LogCursor) -> None:
    summary.epochs, summary.ended = cursor.epoch + 1, cursor.ended
    if record.kind != "data":
        return
    summary.parts, summary.rows, summary.tokens = cursor.part, cursor.rows, cursor.tokens
    summary.bytes += record.bytes
    summary.schema_versions = sorted({*summary.schema_versions, record.schema_version})
    summary.min_policy_version = _version(cursor.min_policy_version)
    summary.max_policy_version = _version(cursor.max_policy_version)
    entry = contents.entries.get(f"{stream.path}/{layout.record(record.seq)}")
    if entry is not None:
        summary.t_last = entry.t_modified
        summary.t_first = summary.t_first or entry.t_modified


def _version(version: int) -> int | None:
    return None if version == NO_VERSION else version


def _stored(contents: Contents, root: str, problems: list[str]) -> list[StoredFiles]:
    try:
        return contents.checkpoints(root)
    except StreamCorrupt as error:
        problems.append(str(error))
        return []


def _files_summary(contents: Contents, stored: StoredFiles) -> FilesSummary:
    return FilesSummary(
        step=stored.step,
        # Other files say which trainer made them; a checkpoint's log has an epoch a trainer.
        incarnation=stored.record.body["state"].get("incarnation", stored.record.epoch),
        bytes=stored.bytes,
        present=all(ref.path in contents.entries for ref in stored.files.values()),
    )


def _staleness(checkpoints: list[StoredFiles]) -> dict[int, int]:
    if not checkpoints:
        return {}
    account = checkpoints[-1].record.body["state"]["account"]
    return {int(staleness): count for staleness, count in account["staleness"].items()}
