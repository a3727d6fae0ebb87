"""A summary of a run's contents, from its commit records. Rows are read only for `first_rows`."""

from typing import Any

from millrace.errors import InputError
from millrace.maintenance.contents import STREAM_KINDS, Contents, StoredStream
from millrace.runs.record import read_run
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.stores.base import Store
from storage.streams.record import NO_VERSION
from storage.streams.stream import Part, StreamReader, read_removed

Json = dict[str, Any]


def inspect(store: Store) -> Json:
    """Summarizes the run at the root of `store` as plain JSON.

    `streams` in the order in which rows flow, each summed over its commit records: `epochs` is the number of writers,
    `removed_parts` how many of the oldest parts lost their rows to gc (they count in all sums), `t_last` the time of
    the last commit (unix seconds), `problem` why later records could not be read. `checkpoints`, `weights` in the
    store and `promoted` models by version, `present` while their files exist. `problems`: damaged logs of these.

    Raises RunMissing, and StreamCorrupt if `run.json` is damaged.
    """
    contents = Contents(store)
    problems: list[str] = []
    return {
        "run_id": read_run(store)["run_id"],
        "run_url": store.url,
        "bytes": sum(entry.bytes for entry in contents.entries.values()),
        "streams": [_summarize(contents, stream) for kind in STREAM_KINDS for stream in contents.of_kind(kind)],
        "checkpoints": _summarize_files(contents, layout.CHECKPOINTS, problems),
        "weights": _summarize_files(contents, layout.WEIGHTS, problems),
        "promoted": _summarize_files(contents, layout.PROMOTED, problems),
        "problems": problems,
    }


def first_rows(store: Store, name: str, num_rows: int) -> Json:
    """The first `num_rows` readable rows of the stream `name` below `streams/`, as plain JSON.

    `problems` has a sentence for each damaged part that was skipped. Raises InputError if there is no such stream,
    StreamCorrupt for a damaged record.
    """
    streams = {stream.name: stream for stream in Contents(store).streams}
    stream = streams.get(name.removeprefix("streams/").strip("/"))
    if stream is None:
        raise InputError(f"no stream {name!r}", file=store.url, expected=f"one of {', '.join(sorted(streams))}")
    rows: list[Json] = []
    problems: list[str] = []
    for part in StreamReader(store, stream.path, stream.schema).each():
        if isinstance(part, Part):
            rows += part.table.slice(0, num_rows - len(rows)).to_pylist()
        elif isinstance(part.error, PartCorrupt):
            problems.append(str(part.error))
        if len(rows) == num_rows:
            break
    return {"stream": stream.name, "rows": rows, "problems": problems}


def _summarize(contents: Contents, stream: StoredStream) -> Json:
    log = contents.read_log(stream.path)
    head = log.head
    listed = [contents.entries.get(f"{stream.path}/{layout.record(record.seq)}") for record in log.parts]
    return {
        "name": stream.name,
        "epochs": head.epoch + 1,
        "parts": head.part,
        "removed_parts": read_removed(contents.store, stream.path),
        "rows": head.rows,
        "tokens": head.tokens,
        "bytes": sum(record.bytes for record in log.parts),
        "min_policy_version": None if head.min_policy_version == NO_VERSION else head.min_policy_version,
        "max_policy_version": None if head.max_policy_version == NO_VERSION else head.max_policy_version,
        "t_last": max((entry.t_modified for entry in listed if entry is not None), default=None),
        "ended": head.ended,
        "problem": None if log.damage is None else str(log.damage),
    }


def _summarize_files(contents: Contents, log: str, problems: list[str]) -> list[Json]:
    try:
        checkpoints = contents.checkpoints(log)
    except StreamCorrupt as error:
        problems.append(str(error))
        return []
    return [
        {
            "step": checkpoint.step,
            # A checkpoint's log has one epoch per trainer. The other logs store the incarnation of the trainer.
            "incarnation": checkpoint.state.get("incarnation", checkpoint.incarnation),
            "bytes": sum(ref.bytes for ref in checkpoint.files.values()),
            "present": contents.has_files(checkpoint),
        }
        for checkpoint in checkpoints
    ]
