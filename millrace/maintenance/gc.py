"""Removes from a run what is no longer needed, and nothing else.

    trajectories   part 0 │ 1 │ 2 │ 3 │ 4 │ 5 …       each part goes together with its scores, oldest first
                   removed│ may go    │ needed        needed: by a kept checkpoint's cursors, or not scored yet
                          └── as far as the retention allows
    logprobs       part 0 │ 1 │ 2 │ 3 │ 4 …           of the trainer: by the same retention; no stage needs them
    weights        anchor │ delta … │ anchor │ delta │ delta      a delta needs all versions from its anchor on
                         may go     │ needed by the newest two
    checkpoints, promoted models    the newest few of each stay, the last one always
                   the checkpoint of the best version evaluated stays as well; it may be exported, not resumed from

    plan       one listing, then every log ─► what to remove, and why
    carry out  <stream>/removed.json: "all parts before N are gone" ─► then the files

Commit records always stay, so the hash chain, the totals and the ledger stay whole. A crash midway leaves files that
removed.json already declares gone; the next gc deletes them.
"""

import heapq
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Literal, get_args

from millrace.maintenance.generator_streams import GeneratorStream, StoredPart, generator_streams
from millrace.maintenance.listing import Contents, best_stored
from millrace.maintenance.orphans import is_temporary, orphans
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.checkpoints import Checkpoint
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import read_removed, write_removed

ORPHAN_SECONDS = 3600.0
"""A file that no record names is garbage once it is this old: no commit takes so long."""
KEPT_WEIGHTS = 2
"""The newest version, the one before it, which a generator may be reading, and all that these are deltas of."""

Kind = Literal["orphans", "checkpoints", "weights", "promoted", "rows"]
KINDS: tuple[Kind, ...] = get_args(Kind)


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What the user wants to keep. Without any of the first three, no rows are removed."""

    keep_age: float | None = None
    """Keep rows younger than this, seconds."""
    keep_versions: int | None = None
    """Keep rows that any of this many newest policy versions sampled, or that were trained for one of them."""
    max_bytes: int | None = None
    """Limit for the files of trajectories, scores and the trainer's log-probabilities together. Above it, more is
    removed, oldest first, whatever the two fields above keep."""
    keep_checkpoints: int = 2
    """This many newest checkpoints stay resumable, and as many newest promoted models stay; at least 1."""

    def __post_init__(self) -> None:
        if self.keep_checkpoints < 1:
            raise ValueError("keep_checkpoints must be at least 1, or nothing could be resumed")


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One file to remove."""

    kind: Kind
    path: str
    """Relative to the run."""
    bytes: int
    reason: str


@dataclass(kw_only=True)
class Plan:
    """What gc would remove."""

    removals: list[Removal] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Log → how many of its first parts (or checkpoints) have no files from then on."""
    notes: list[str] = field(default_factory=list)
    """Parts of the retention that cannot be met."""

    def files(self) -> Counter[Kind]:
        """Files to remove, by kind."""
        return Counter(removal.kind for removal in self.removals)

    def freed(self) -> Counter[Kind]:
        """Bytes by kind."""
        freed: Counter[Kind] = Counter()
        for removal in self.removals:
            freed[removal.kind] += removal.bytes
        return freed


def plan(store: Store, retention: Retention, *, now: float | None = None) -> Plan:
    """What can be removed at the time `now` (unix seconds; default: the current time). Changes nothing.

    Raises RunMissing, and StreamCorrupt for a damaged log, as it may name files that are still needed.
    """
    now = time.time() if now is None else now
    contents = Contents(store)
    made = Plan()
    # Checkpoints first: a running trainer only moves forward, so they need at least as much as it will need later.
    checkpoints, weights, promoted = (contents.checkpoints(log) for log in layout.FILE_LOGS)
    kept = _plan_checkpoints(made, contents, checkpoints, retention.keep_checkpoints)
    _plan_files(made, contents, "weights", layout.WEIGHTS, weights, _kept_weights(weights))
    _plan_files(made, contents, "promoted", layout.PROMOTED, promoted, retention.keep_checkpoints)
    named = {ref.path for stored in (*checkpoints, *weights, *promoted) for ref in stored.files.values()}
    heads = {log: LogCursor() for log in layout.FILE_LOGS}
    data: dict[str, list[Record]] = {}
    # In this order each score finds its trajectory.
    for stream in contents.streams:
        heads[stream.path], data[stream.path] = LogCursor(), []
        for record, cursor in contents.log(stream.path):
            heads[stream.path] = cursor
            if record.kind == "data":
                data[stream.path].append(record)
                named.add(f"{stream.path}/{record.file}")
    newest = checkpoints[-1].step if checkpoints else 0
    _plan_rows(made, generator_streams(contents, data, kept), retention, newest=newest, now=now)
    for orphan in orphans(contents, named, heads):
        if orphan.garbage and now - orphan.t_modified > ORPHAN_SECONDS:
            made.removals.append(Removal(kind="orphans", path=orphan.path, bytes=orphan.bytes, reason=orphan.reason))
    return made


def plan_checkpoints(store: Store, keep: int) -> Plan:
    """What can be removed of the checkpoints alone: all but the newest `keep` and the best. Lists nothing else.

    Raises as `plan`.
    """
    contents, made = Contents(store, layout.CHECKPOINTS), Plan()
    _plan_checkpoints(made, contents, contents.checkpoints(), keep)
    return made


def carry_out(store: Store, made: Plan) -> None:
    """Removes what the plan lists. May be called again, also after a crash."""
    for log, parts in made.marks.items():
        if parts > read_removed(store, log):
            write_removed(store, log, parts=parts, why="millrace gc")
    for removal in made.removals:
        if is_temporary(removal.path):
            _delete_temporary(store, removal.path)
        else:
            store.delete(removal.path)


def _plan_checkpoints(made: Plan, contents: Contents, checkpoints: list[Checkpoint], keep: int) -> list[Checkpoint]:
    """As `_plan_files`, of the trainer's checkpoints."""
    stored = {
        (checkpoint.step, weights_checksum(checkpoint)): checkpoint
        for checkpoint in checkpoints
        if all(ref.path in contents.entries for ref in checkpoint.files.values())
    }
    result = best_stored(contents.store, stored.values(), base_model=False)
    best = None if result is None else stored[result["policy_version"], result["weights_checksum"]]
    return _plan_files(made, contents, "checkpoints", layout.CHECKPOINTS, checkpoints, keep, best)


def _plan_files(
    made: Plan,
    contents: Contents,
    kind: Kind,
    log: str,
    stored: list[Checkpoint],
    keep: int,
    best: Checkpoint | None = None,
) -> list[Checkpoint]:
    """Plans the removal of the files of all but the newest `keep` records and `best`.

    Returns the newest records, oldest first: a run can be resumed from each of them. Records that name the same files
    count once. Otherwise an adopted checkpoint would push out the only other one to fall back on.
    """
    first = len(stored)
    needed: list[frozenset[str]] = []
    for checkpoint in reversed(stored):
        files = frozenset(ref.path for ref in checkpoint.files.values())
        if files not in needed:
            if len(needed) == keep:
                break
            needed.append(files)
        first -= 1
    if best is not None:
        needed.append(frozenset(ref.path for ref in best.files.values()))
    in_use = frozenset().union(*needed)
    old = {ref.path: ordinal for ordinal, record in enumerate(stored[:first]) for ref in record.files.values()}
    for path, ordinal in sorted(old.items()):
        if path not in in_use and path in contents.entries:
            reason = f"version {stored[ordinal].step}, {len(stored) - ordinal - 1} newer ones exist"
            made.removals.append(Removal(kind=kind, path=path, bytes=contents.entries[path].bytes, reason=reason))
    if first > 0:
        made.marks[log] = first
    return stored[first:]


def _kept_weights(weights: list[Checkpoint]) -> int:
    """How many of the newest versions stay, so that every kept delta keeps the version it builds on."""
    kept = min(KEPT_WEIGHTS, len(weights))
    while kept < len(weights) and weights[-kept].state.get("kind") == "delta":
        kept += 1
    return kept


def _plan_rows(made: Plan, streams: list[GeneratorStream], retention: Retention, *, newest: int, now: float) -> None:
    ends = [stream.removed for stream in streams]
    if retention.keep_age is not None or retention.keep_versions is not None:
        for number, stream in enumerate(streams):
            while ends[number] < stream.needed and not _wanted(stream.parts[ends[number]], retention, newest, now):
                ends[number] += 1
    if retention.max_bytes is not None:
        left = _shrink(streams, ends, retention.max_bytes)
        if left > retention.max_bytes:
            made.notes.append(f"{left:,} bytes of rows are still needed, more than the {retention.max_bytes:,} allowed")
    for stream, end in zip(streams, ends, strict=True):
        if end > 0:
            made.marks |= stream.marks(end)
        for part in stream.parts[:end]:
            reason = f"part {part.ordinal}, versions up to {part.max_policy_version}"
            if part.ordinal < stream.removed:
                reason = "left over from an earlier gc"
            made.removals += [Removal(kind="rows", path=p, bytes=size, reason=reason) for p, size in part.files.items()]


def _wanted(part: StoredPart, retention: Retention, newest: int, now: float) -> bool:
    """Whether the user wants to keep the part for its age or its policy version."""
    young = retention.keep_age is not None and now - part.t < retention.keep_age
    recent = retention.keep_versions is not None and part.max_policy_version > newest - retention.keep_versions
    return young or recent


def _shrink(streams: list[GeneratorStream], ends: list[int], max_bytes: int) -> int:
    """Moves `ends` on, oldest part first, until the parts left fit into `max_bytes` or are all needed.

    Returns the bytes left.
    """
    left = sum(stream.bytes_from(end) for stream, end in zip(streams, ends, strict=True))
    oldest = [(s.parts[ends[number]].t, number) for number, s in enumerate(streams) if ends[number] < s.needed]
    heapq.heapify(oldest)
    while oldest and left > max_bytes:
        _, number = heapq.heappop(oldest)
        stream = streams[number]
        left -= stream.parts[ends[number]].bytes
        ends[number] += 1
        if ends[number] < stream.needed:
            heapq.heappush(oldest, (stream.parts[ends[number]].t, number))
    return left


def _delete_temporary(store: Store, path: str) -> None:
    """Deletes a file or folder that the store itself neither lists nor addresses. Only local stores have these."""
    root = store.local_path("")
    if root is None:
        return
    target = root / path
    if target.is_dir():
        shutil.rmtree(target)
    else:
        target.unlink(missing_ok=True)
