"""Files of a run that no record names: left by killed processes, or put there by someone else.

seg/<epoch>-….arrows    a part whose writer died before the commit
data/<step>-…/NAME      a file of a checkpoint, a weights version or a promoted model that was never committed
.tmp-…                  a local write that was never renamed to its final name
anything else           not a Millrace file: never touched
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.maintenance.listing import Contents
from storage import layout
from storage.stores.base import TEMPORARY_PREFIX, Entry
from storage.streams.log import LogCursor

_PART = re.compile(r"(?P<log>.+)/seg/(?P<epoch>\d+)-[^/]+\.arrows")
_CHECKPOINT_FILE = re.compile(rf"(?P<log>{'|'.join(layout.FILE_LOGS)})/(?P<folder>data/[^/]+)/.+")
_FILES = {
    layout.RUN,
    layout.SUMMARY,
    layout.START_MANIFEST,
    layout.START_HASHES,
    layout.REPLAY,
    layout.NOTE,
}
_FOLDERS = (
    layout.ATTEMPTS,
    layout.START_MODEL,
    layout.PROGRESS,
    layout.CURRICULUM,
    layout.DECISIONS,
    layout.INCIDENTS,
    layout.EVALUATIONS,
    layout.REPORTS,
    layout.LOGS,
    layout.QUARANTINE,
    layout.PARQUET,
    layout.REPLAY_RESULTS,
)


@dataclass(frozen=True, kw_only=True)
class Orphan:
    """A file, or a temporary folder, that no record names."""

    path: str
    """Relative to the run."""
    bytes: int
    t_modified: float
    """When it was last written, unix seconds; of a checkpoint's file: when the newest file of its folder was."""
    reason: str
    garbage: bool
    """Whether it is useless once no process can still be writing it; otherwise it belongs to someone else."""


def orphans(contents: Contents, named: set[str], heads: Mapping[str, LogCursor]) -> list[Orphan]:
    """All orphans, sorted by path. `named` are the files that records name, `heads` the ends of the sound logs.

    Files of a log that is not in `heads` are left out: its unreadable records may name them.
    """
    found = _temporary(contents)
    for entry in contents.entries.values():
        if entry.path not in named and (orphan := _orphan(contents, entry, heads)) is not None:
            found.append(orphan)
    return sorted(found, key=lambda orphan: orphan.path)


def is_temporary(path: str) -> bool:
    """Whether a path is that of an unfinished write, or inside a temporary folder."""
    return any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/"))


def _orphan(contents: Contents, entry: Entry, heads: Mapping[str, LogCursor]) -> Orphan | None:
    path, t_modified = entry.path, entry.t_modified
    folder, _, name = path.rpartition("/")
    if path in _FILES or path.startswith(tuple(f"{known}/" for known in _FOLDERS)) or is_temporary(path):
        return None
    logs = {stream.path for stream in contents.streams} | set(layout.FILE_LOGS)
    if (folder in logs and name in (layout.HEAD, layout.REMOVED)) or (
        layout.record_seq(path) is not None and folder[:-4] in logs
    ):
        return None
    reason, garbage = "not a file of a run", False
    if path.startswith(f"{layout.PROBE}/"):
        reason, garbage = "left by a test of the store", True
    elif found := _PART.fullmatch(path):
        if (head := heads.get(found["log"])) is None:
            return None
        garbage = int(found["epoch"]) < head.epoch or head.ended
        reason = "never committed" if garbage else "not committed yet: its writer may still be running"
    elif found := _CHECKPOINT_FILE.fullmatch(path):
        if found["log"] not in heads:
            return None
        reason, garbage = "never committed", True
        t_modified = max(other.t_modified for other in contents.below(f"{found['log']}/{found['folder']}"))
    return Orphan(path=path, bytes=entry.bytes, t_modified=t_modified, reason=reason, garbage=garbage)


def _temporary(contents: Contents) -> list[Orphan]:
    """Unfinished writes. Only a local store can leave them, and its listing omits them."""
    root = contents.store.local_path("")
    if root is None:
        return []
    found = root.rglob(f"{TEMPORARY_PREFIX}*")
    return [_unfinished(root, path) for path in found if not is_temporary(str(path.parent.relative_to(root)))]


def _unfinished(root: Path, path: Path) -> Orphan:
    stats = [found.stat() for found in (path, *path.rglob("*")) if found.exists()]
    return Orphan(
        path=path.relative_to(root).as_posix(),
        bytes=sum(stat.st_size for stat in stats),
        t_modified=max((stat.st_mtime for stat in stats), default=0.0),
        reason="an interrupted write",
        garbage=True,
    )
