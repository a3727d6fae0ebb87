"""Removes from a run everything that is no longer needed, and nothing else.

    trajectories   part 0 │ 1 │ 2 │ 3 │ 4 │ 5 …       each part goes together with its scores, oldest first
                   removed│ may go    │ needed        needed: by a kept checkpoint's cursors, or not scored yet
                          └── as far as the retention allows; the trainer's log-probabilities too
    weights        anchor │ delta … │ anchor │ delta │ delta      a delta needs all versions from its anchor on
                         may go     │ needed by the newest two
    checkpoints, promoted models    the newest few of each stay; the checkpoint with the best evaluation too, for export

    plan ─► carry out: <stream>/removed.json, "all parts before N are gone" ─► then the files

Commit records always stay, so the hash chain, the totals and the ledger stay whole. A crash midway leaves files that
removed.json already declares gone; the next gc deletes them.
"""

import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from millrace.maintenance.contents import Contents, StoredLog, StoredStream, best_stored
from millrace.maintenance.orphans import is_temporary, orphans
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.checkpoints import Checkpoint
from storage.stores.base import Entry, Store
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import read_removed, write_removed

ORPHAN_SECONDS = 3600.0
"""A file that no record names is garbage once it is this old: every commit is faster."""
KEPT_WEIGHTS = 2
"""The newest version, and the one before it, which a generator may be reading; their anchors stay too."""

KINDS = ("orphans", "checkpoints", "weights", "promoted", "rows")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """The user's limits. Without any of the first three, no rows are removed."""

    keep_age: float | None = None
    """Keep rows younger than this, seconds."""
    keep_versions: int | None = None
    """Keep rows that any of this many newest policy versions sampled, or that were trained for one of them."""
    max_bytes: int | None = None
    """Limit for all rows together. Above it, more is removed, oldest first, whatever the two fields above keep."""
    keep_checkpoints: int = 2
    """This many newest checkpoints stay resumable, and as many newest promoted models stay; at least 1."""


@dataclass(frozen=True, kw_only=True)
class Removal:
    """One file to remove."""

    kind: str
    """One of KINDS."""
    path: str
    """Relative to the run."""
    bytes: int
    reason: str


@dataclass(kw_only=True)
class RemovalPlan:
    """The files that gc would remove."""

    removals: list[Removal] = field(default_factory=list)
    marks: dict[str, int] = field(default_factory=dict)
    """Log → how many of its first parts (or checkpoints) have no files from then on."""
    notes: list[str] = field(default_factory=list)
    """Limits that can't be met."""

    def files(self) -> Counter[str]:
        """Files to remove, by kind."""
        return Counter(removal.kind for removal in self.removals)

    def freed(self) -> Counter[str]:
        """Bytes by kind."""
        freed: Counter[str] = Counter()
        for removal in self.removals:
            freed[removal.kind] += removal.bytes
        return freed


def plan(store: Store, retention: Retention, *, now: float | None = None) -> RemovalPlan:
    """Plans the removals at the time `now` (unix seconds; default: the current time). Changes nothing.

    Raises RunMissing, and StreamCorrupt for a damaged log, as it may name files that are still needed.
    """
    now = time.time() if now is None else now
    contents = Contents(store)
    made = RemovalPlan()
    # Checkpoints first: a running trainer only moves forward, so they need at least as much as it will need later.
    checkpoints, weights, promoted = (contents.checkpoints(log) for log in layout.FILE_LOGS)
    kept = _plan_checkpoints(made, contents, checkpoints, retention.keep_checkpoints)
    _plan_files(made, contents, layout.WEIGHTS, weights, _num_kept_weights(weights))
    _plan_files(made, contents, layout.PROMOTED, promoted, retention.keep_checkpoints)
    # In this order each score finds its trajectory.
    logs = {stream.path: contents.read_sound_log(stream.path) for stream in contents.streams}
    newest = checkpoints[-1].step if checkpoints else 0
    _plan_rows(made, _prunable_streams(contents, logs, kept), retention, newest=newest, now=now)
    named = {ref.path for stored in (*checkpoints, *weights, *promoted) for ref in stored.files.values()}
    named |= {f"{path}/{record.file}" for path, log in logs.items() for record in log.parts}
    heads = {log: LogCursor() for log in layout.FILE_LOGS} | {path: log.head for path, log in logs.items()}
    for orphan in orphans(contents, named, heads):
        if orphan.garbage and now - orphan.t_modified > ORPHAN_SECONDS:
            made.removals.append(Removal(kind="orphans", path=orphan.path, bytes=orphan.bytes, reason=orphan.reason))
    return made


def plan_checkpoints(store: Store, keep: int) -> RemovalPlan:
    """Plans the removal of all checkpoints but the newest `keep` and the best. Lists no other files.

    Raises as `plan`.
    """
    contents, made = Contents(store, layout.CHECKPOINTS), RemovalPlan()
    _plan_checkpoints(made, contents, contents.checkpoints(), keep)
    return made


def carry_out(store: Store, made: RemovalPlan) -> None:
    """Removes the planned files. May be called again, also after a crash."""
    for log, parts in made.marks.items():
        if parts > read_removed(store, log):
            write_removed(store, log, parts=parts, why="millrace gc")
    for removal in made.removals:
        path = store.local_path("") if is_temporary(removal.path) else None
        if path is None:
            store.delete(removal.path)
        # A store does not address temporary files.
        elif (path / removal.path).is_dir():
            shutil.rmtree(path / removal.path)
        else:
            (path / removal.path).unlink(missing_ok=True)


def _plan_checkpoints(
    made: RemovalPlan, contents: Contents, checkpoints: list[Checkpoint], keep: int
) -> list[Checkpoint]:
    """Plans as `_plan_files` for the trainer's checkpoints, and keeps the best."""
    stored = {(c.step, weights_checksum(c)): c for c in checkpoints if contents.has_files(c)}
    result = best_stored(contents.store, stored.values(), base_model=False)
    best = None if result is None else stored[result["policy_version"], result["weights_checksum"]]
    return _plan_files(made, contents, layout.CHECKPOINTS, checkpoints, keep, best)


def _plan_files(
    made: RemovalPlan, contents: Contents, log: str, stored: list[Checkpoint], keep: int, best: Checkpoint | None = None
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
    in_use = {path for files in needed for path in files}
    in_use |= set() if best is None else {ref.path for ref in best.files.values()}
    old = {ref.path: ordinal for ordinal, record in enumerate(stored[:first]) for ref in record.files.values()}
    kind = log.rpartition("/")[2]
    for path, ordinal in sorted(old.items()):
        if path not in in_use and path in contents.entries:
            reason = f"version {stored[ordinal].step}, {len(stored) - ordinal - 1} newer ones exist"
            made.removals.append(Removal(kind=kind, path=path, bytes=contents.entries[path].bytes, reason=reason))
    if first > 0:
        made.marks[log] = first
    return stored[first:]


def _num_kept_weights(weights: list[Checkpoint]) -> int:
    """Number of newest versions to keep, so that every kept delta keeps the versions it builds on."""
    kept = min(KEPT_WEIGHTS, len(weights))
    while kept < len(weights) and weights[-kept].state.get("kind") == "delta":
        kept += 1
    return kept


@dataclass(kw_only=True)
class _PrunableStream:
    """One generator's trajectories with their scores, or the trainer's log-probabilities; parts go oldest first."""

    path: str
    parts: list[Record]
    files: list[list[Entry]]
    """[parts] the existing files of each part, its scores included."""
    removed: int
    """Parts removed by earlier calls."""
    end: int
    """Parts removed after this call."""
    needed: int
    """The first part that a kept checkpoint, a scorer or the generator itself still needs."""
    scores: list[StoredStream] = field(default_factory=list)

    def bytes(self, part: int) -> int:
        """Size of a part's files."""
        return sum(entry.bytes for entry in self.files[part])

    def t(self, part: int) -> float:
        """When a part was written, unix seconds; 0 if it is gone."""
        return max((entry.t_modified for entry in self.files[part]), default=0.0)


def _prunable_streams(contents: Contents, logs: dict[str, StoredLog], kept: list[Checkpoint]) -> list[_PrunableStream]:
    """The streams of a run whose checkpoints `kept` must stay resumable."""
    prunable = []
    for stream in (*contents.of_kind("trajectories"), *contents.of_kind("trainer_logprobs")):
        parts = logs[stream.path].parts
        files = [_listed(contents, stream.path, record) for record in parts]
        removed = read_removed(contents.store, stream.path)
        scores: list[StoredStream] = []
        if stream.kind == "trainer_logprobs":
            # No stage reads these parts, so all of them may go, except those newer than the listing.
            needed = max([removed, *(part + 1 for part, entries in enumerate(files) if entries)])
        else:
            sets = contents.scores_of(stream.generator)
            scores = [scored for streams in sets.values() for scored in streams if scored is not None]
            missing = [scorer for streams in sets.values() for scorer, scored in enumerate(streams) if scored is None]
            unscored = [scored.trajectory_part(len(logs[scored.path].parts)) for scored in scores]
            first_read = [_first_read(checkpoint.state, stream.generator) for checkpoint in kept]
            needed = min([len(parts), *missing, *unscored, *first_read]) if kept and sets else 0
            for scored in scores:
                for record in logs[scored.path].parts:
                    files[scored.trajectory_part(record.part)] += _listed(contents, scored.path, record)
        prunable.append(
            _PrunableStream(
                path=stream.path, parts=parts, files=files, removed=removed, end=removed, needed=needed, scores=scores
            )
        )
    return prunable


def _listed(contents: Contents, path: str, record: Record) -> list[Entry]:
    """The file of a part, if it was listed."""
    entry = contents.entries.get(f"{path}/{record.file}")
    return [] if entry is None else [entry]


def _first_read(state: dict[str, Any], generator: int) -> int:
    """The first part of a generator that a loader opened at a checkpoint reads; 0 if the checkpoint has no cursors."""
    if generator >= len(state["intake"]):
        return 0
    cursors = state["intake"][generator]
    scores = [LogCursor.from_json(cursor).part for cursor in cursors["scores"]]
    scored = [layout.scored_part(scorer, part, len(scores)) for scorer, part in enumerate(scores)]
    return min(LogCursor.from_json(cursors["trajectories"]).part, *scored)


def _plan_rows(
    made: RemovalPlan, streams: list[_PrunableStream], retention: Retention, *, newest: int, now: float
) -> None:
    if retention.keep_age is not None or retention.keep_versions is not None:
        for stream in streams:
            while stream.end < stream.needed and not _is_kept(stream, stream.end, retention, newest, now):
                stream.end += 1
    if retention.max_bytes is not None:
        left = sum(stream.bytes(part) for stream in streams for part in range(stream.end, len(stream.parts)))
        while left > retention.max_bytes and (shrinkable := [s for s in streams if s.end < s.needed]):
            stream = min(shrinkable, key=lambda stream: stream.t(stream.end))
            left -= stream.bytes(stream.end)
            stream.end += 1
        if left > retention.max_bytes:
            made.notes.append(f"{left:,} bytes of rows are still needed, more than the {retention.max_bytes:,} allowed")
    for stream in streams:
        counts = {s.path: layout.num_scored_parts(s.scorer, stream.end, s.num_scorers) for s in stream.scores}
        made.marks |= {path: count for path, count in {stream.path: stream.end, **counts}.items() if count > 0}
        for part in range(stream.end):
            reason = f"part {part}, versions up to {stream.parts[part].max_policy_version}"
            if part < stream.removed:
                reason = "left over from an earlier gc"
            made.removals += [
                Removal(kind="rows", path=entry.path, bytes=entry.bytes, reason=reason) for entry in stream.files[part]
            ]


def _is_kept(stream: _PrunableStream, part: int, retention: Retention, newest: int, now: float) -> bool:
    """Whether the user wants to keep a part for its age or its policy version."""
    young = retention.keep_age is not None and now - stream.t(part) < retention.keep_age
    versions = retention.keep_versions
    return young or (versions is not None and stream.parts[part].max_policy_version > newest - versions)
