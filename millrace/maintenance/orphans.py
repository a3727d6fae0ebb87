"""Files of a run that no record names: left by killed processes, or put there by someone else.

seg/<epoch>-….arrows    a part whose writer died before the commit
data/<step>-…/NAME      a file of a checkpoint, a weights version or a promoted model that was never committed
.tmp-…                  a local write that was never renamed to its final name
anything else           not a Millrace file: never touched
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from millrace.maintenance.contents import Contents
from storage import layout
from storage.stores.base import TEMPORARY_PREFIX, Entry
from storage.streams.log import LogCursor

_PART = re.compile(r"(?P<log>.+)/seg/(?P<epoch>\d+)-[^/]+\.arrows")
_CHECKPOINT_FILE = re.compile(rf"(?P<log>{'|'.join(layout.FILE_LOGS)})/(?P<folder>data/[^/]+)/.+")
# fmt: off
_WITHOUT_RECORDS = {
    layout.RUN, layout.SUMMARY, layout.START_MANIFEST, layout.START_HASHES, layout.REPLAY,
    layout.NOTE, layout.ATTEMPTS, layout.START_MODEL, layout.PROGRESS, layout.CURRICULUM, layout.DECISIONS,
    layout.INCIDENTS, layout.EVALUATIONS, layout.REPORTS, layout.LOGS, layout.QUARANTINE, layout.PARQUET,
    layout.REPLAY_RESULTS,
}
# fmt: on
"""Files and folders at the top of a run whose contents no record names."""


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A file, or a temporary folder, that no record names."""

    path: str
    """Relative to the run."""
    bytes: int
    t_modified: float
    """Last write, unix seconds; for a checkpoint's file, the last write in its folder."""
    reason: str
    garbage: bool
    """Whether it is useless once no process can still be writing it; otherwise it belongs to someone else."""


def orphans(contents: Contents, named: set[str], heads: Mapping[str, LogCursor]) -> list[Orphan]:
    """All orphans, sorted by path. `named` are the files that records name, `heads` the ends of the sound logs.

    Files of a log that is not in `heads` are left out: its unreadable records may name them.
    """
    logs = {stream.path for stream in contents.streams} | set(layout.FILE_LOGS)
    orphans = _unfinished_writes(contents)
    for entry in contents.entries.values():
        if entry.path not in named and not _needs_no_record(entry.path, logs):
            orphan = _orphan(contents, entry, heads)
            orphans += [] if orphan is None else [orphan]
    return sorted(orphans, key=lambda orphan: orphan.path)


def is_temporary(path: str) -> bool:
    """Whether a path is that of an unfinished write, or inside a temporary folder."""
    return any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/"))


def _needs_no_record(path: str, logs: set[str]) -> bool:
    folder, _, name = path.rpartition("/")
    is_record = layout.record_seq(path) is not None and folder.removesuffix("/log") in logs
    is_hint = folder in logs and name in (layout.HEAD, layout.REMOVED)
    return is_record or is_hint or is_temporary(path) or path.partition("/")[0] in _WITHOUT_RECORDS


def _orphan(contents: Contents, entry: Entry, heads: Mapping[str, LogCursor]) -> Orphan | None:
    t_modified = entry.t_modified
    reason, garbage = "not a file of a run", False
    if part := _PART.fullmatch(entry.path):
        if (head := heads.get(part["log"])) is None:
            return None
        garbage = int(part["epoch"]) < head.epoch or head.ended
        reason = "never committed" if garbage else "not committed yet: its writer may still be running"
    elif file := _CHECKPOINT_FILE.fullmatch(entry.path):
        if file["log"] not in heads:
            return None
        reason, garbage = "never committed", True
        t_modified = max(other.t_modified for other in contents.below(f"{file['log']}/{file['folder']}"))
    return Orphan(path=entry.path, bytes=entry.bytes, t_modified=t_modified, reason=reason, garbage=garbage)


def _unfinished_writes(contents: Contents) -> list[Orphan]:
    """Temporary files and folders, each with its contents. Only a local store can leave them."""
    root = contents.store.local_path("")
    orphans: list[Orphan] = []
    if root is None:
        return orphans
    for path in root.rglob(f"{TEMPORARY_PREFIX}*"):
        relative = path.relative_to(root)
        if is_temporary(relative.parent.as_posix()):
            continue
        stats = [file.stat() for file in (path, *path.rglob("*")) if file.exists()]
        orphans.append(
            Orphan(
                path=relative.as_posix(),
                bytes=sum(stat.st_size for stat in stats),
                t_modified=max((stat.st_mtime for stat in stats), default=0.0),
                reason="an interrupted write",
                garbage=True,
            )
        )
    return orphans
