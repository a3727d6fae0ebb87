"""Removes from a run everything that is no longer needed, and nothing else.

    trajectories   part 0 │ 1 │ 2 │ 3 │ 4 │ 5 …       each part goes together with its annotations, oldest first
                   removed│ may go    │ needed        needed: by a kept checkpoint's cursors, or not annotated
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

from millrace.maintenance.contents import Contents, best_stored, find_orphans, is_temporary
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

    def remove(self, kind: str, file: Entry, reason: str) -> None:
        """Adds a file to the plan."""
        self.removals.append(Removal(kind=kind, path=file.path, bytes=file.bytes, reason=reason))


def plan(store: Store, retention: Retention, *, now: float | None = None) -> RemovalPlan:
    """Plans the removals at the time `now` (unix seconds; default: the current time). Changes nothing.

    Raises RunMissing, and StreamCorrupt for a damaged log, as it may name files that are still needed.
    """
    now = time.time() if now is None else now
    contents, made = Contents(store), RemovalPlan()
    # Checkpoints first: a running trainer only moves forward, so they need at least as much as it will need later.
    kept = _plan_checkpoints(made, contents, retention.keep_checkpoints)
    weights = contents.checkpoints(layout.WEIGHTS)
    kept_weights = KEPT_WEIGHTS
    # A kept delta keeps the versions that it builds on.
    while kept_weights < len(weights) and weights[-kept_weights].state.get("kind") == "delta":
        kept_weights += 1
    _plan_files(made, contents, layout.WEIGHTS, kept_weights)
    _plan_files(made, contents, layout.PROMOTED, retention.keep_checkpoints)
    # In this order each annotation finds its trajectory.
    for stream in contents.streams:
        contents.read_sound_log(stream.path)
    _plan_rows(made, _prunable_streams(contents, kept), retention, newest=kept[-1].step if kept else 0, now=now)
    for entry, reason in find_orphans(contents):
        if now - entry.t_modified > ORPHAN_SECONDS:
            made.remove("orphans", entry, reason)
    return made


def plan_checkpoints(store: Store, keep: int) -> RemovalPlan:
    """Plans the removal of all checkpoints but the newest `keep` and the best. Lists no other files.

    Raises as `plan`.
    """
    made = RemovalPlan()
    _plan_checkpoints(made, Contents(store, layout.CHECKPOINTS), keep)
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


def _plan_checkpoints(made: RemovalPlan, contents: Contents, keep: int) -> list[Checkpoint]:
    """Plans as `_plan_files` for the trainer's checkpoints, and keeps the best one."""
    stored = {(c.step, weights_checksum(c)): c for c in contents.checkpoints() if contents.has_files(c)}
    result = best_stored(contents.store, stored.values())
    best = None if result is None else stored.get((result["policy_version"], result.get("weights_checksum", "")))
    return _plan_files(made, contents, layout.CHECKPOINTS, keep, best)


def _plan_files(
    made: RemovalPlan, contents: Contents, log: str, keep: int, best: Checkpoint | None = None
) -> list[Checkpoint]:
    """Plans the removal of the files of all but the newest `keep` records and `best`.

    Returns the newest records, oldest first: a run can be resumed from each of them. Records that name the same files
    count once. Otherwise an adopted checkpoint would push out the only other one to fall back on.
    """
    stored = contents.checkpoints(log)
    first = len(stored)
    kept: set[frozenset[str]] = set()
    while first > 0 and len(kept | {_files(stored[first - 1])}) <= keep:
        first -= 1
        kept.add(_files(stored[first]))
    in_use = frozenset(() if best is None else _files(best)).union(*kept)
    old = {path: ordinal for ordinal, record in enumerate(stored[:first]) for path in _files(record)}
    for path, ordinal in sorted(old.items()):
        if path not in in_use and path in contents.entries:
            reason = f"version {stored[ordinal].step}, {len(stored) - ordinal - 1} newer ones exist"
            made.remove(log.rpartition("/")[2], contents.entries[path], reason)
    if first > 0:
        made.marks[log] = first
    return stored[first:]


def _files(checkpoint: Checkpoint) -> frozenset[str]:
    return frozenset(ref.path for ref in checkpoint.files.values())


@dataclass(kw_only=True)
class _PrunableStream:
    """A generator's trajectories with their annotations, or the trainer's log-probabilities; parts go oldest first."""

    path: str
    parts: list[Record]
    files: list[list[Entry]]
    """[parts] the existing files of each part, its annotations included."""
    end: int
    """Parts removed by earlier calls and this one."""
    needed: int = 0
    """The first part that a kept checkpoint, an annotator or the generator itself still needs."""
    annotations: list[tuple[str, int, int]] = field(default_factory=list)
    """Path, annotator and number of annotators of each of the streams that annotate it."""

    def bytes(self, part: int) -> int:
        """Size of a part's files."""
        return sum(entry.bytes for entry in self.files[part])

    def t(self, part: int) -> float:
        """When a part was written, unix seconds; 0 if it is gone."""
        return max((entry.t_modified for entry in self.files[part]), default=0.0)


def _prunable_streams(contents: Contents, kept: list[Checkpoint]) -> list[_PrunableStream]:
    """The streams of a run whose checkpoints `kept` must stay resumable."""

    def listed(path: str, record: Record) -> list[Entry]:
        entry = contents.entries.get(f"{path}/{record.file}")
        return [] if entry is None else [entry]

    prunable = []
    for stream in (*contents.of_kind("trajectories"), *contents.of_kind("trainer_logprobs")):
        parts, removed = contents.logs[stream.path].parts, read_removed(contents.store, stream.path)
        files = [listed(stream.path, record) for record in parts]
        pruned = _PrunableStream(path=stream.path, parts=parts, files=files, end=removed)
        prunable.append(pruned)
        if stream.kind == "trainer_logprobs":
            # No stage reads these parts, so all of them may go, except those newer than the listing.
            pruned.needed = max((part + 1 for part, entries in enumerate(files) if entries), default=0)
            continue
        needed = [len(parts), *(_first_read(checkpoint.state, stream.generator) for checkpoint in kept)]
        streams = [each for each in contents.annotations if each.generator == stream.generator]
        for pool, count in {(each.pool, each.num_annotators) for each in streams}:
            for annotator in range(count):
                path = layout.annotations(pool, stream.generator, annotator, count)
                annotated = contents.read_sound_log(path).parts
                needed.append(layout.annotated_part(annotator, len(annotated), count))
                pruned.annotations.append((path, annotator, count))
                for record in annotated:
                    files[layout.annotated_part(annotator, record.part, count)] += listed(path, record)
        pruned.needed = min(needed) if kept and streams else 0
    return prunable


def _first_read(state: dict[str, Any], generator: int) -> int:
    """The first part of a generator that a loader opened at a checkpoint reads; 0 if the checkpoint has no cursors."""
    if generator >= len(state["intake"]):
        return 0
    cursors = state["intake"][generator]
    annotated = [
        layout.annotated_part(annotator, LogCursor.from_json(cursor).part, len(of_pool))
        for of_pool in cursors["annotations"].values()
        for annotator, cursor in enumerate(of_pool)
    ]
    return min(LogCursor.from_json(cursors["trajectories"]).part, *annotated)


def _plan_rows(
    made: RemovalPlan, streams: list[_PrunableStream], retention: Retention, *, newest: int, now: float
) -> None:
    if retention.keep_age is not None or retention.keep_versions is not None:
        for stream in streams:
            while stream.end < stream.needed:
                is_young = retention.keep_age is not None and now - stream.t(stream.end) < retention.keep_age
                newest_of_part = stream.parts[stream.end].max_policy_version
                versions = retention.keep_versions
                if is_young or (versions is not None and newest_of_part > newest - versions):
                    break
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
        counts = {
            path: layout.num_annotated_parts(annotator, stream.end, num) for path, annotator, num in stream.annotations
        }
        made.marks |= {path: count for path, count in {stream.path: stream.end, **counts}.items() if count > 0}
        for part in range(stream.end):
            for entry in stream.files[part]:
                made.remove("rows", entry, f"part {part}, versions up to {stream.parts[part].max_policy_version}")
