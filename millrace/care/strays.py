"""Files of a run that no record names: left by processes that were killed, or put there by somebody else.

seg/<epoch>-….arrows    no record names it: written, and its writer died before the commit
data/<step>-…/NAME      the same of a checkpoint, of weights on their way, or of a promoted model
.tmp-…                  a local write that never got its name
anything else           not a file of Millrace's: never touched
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from millrace.care.contents import Contents, is_record
from storage import layout
from storage.log import LogCursor
from storage.store import TEMPORARY_PREFIX, Entry

_SEGMENT = re.compile(r"(?P<log>.+)/seg/(?P<epoch>\d+)-[^/]+\.arrows")
_CHECKPOINT_FILE = re.compile(rf"(?P<log>{'|'.join(layout.FILE_LOGS)})/(?P<folder>data/[^/]+)/.+")
_FILES = {layout.RUN, layout.SUMMARY, layout.START_MANIFEST, layout.START_HASHES, layout.REPLAY}
_FOLDERS = (
    layout.ATTEMPTS,
    layout.START_MODEL,
    layout.PROGRESS,
    layout.EVALUATIONS,
    layout.REPORTS,
    layout.LOGS,
    layout.QUARANTINE,
    layout.PARQUET,
    layout.REPLAY_RESULTS,
)


@dataclass(frozen=True, kw_only=True)
class Stray:
    """A file, or a temporary folder, that no record names."""

    path: str
    """Relative to the run."""
    bytes: int
    t_modified: float
    """When it, or the newest file beside it that belongs to it, was written, unix seconds."""
    reason: str
    garbage: bool
    """Whether it is known to be of no use once nobody can be writing it any more; else it is somebody else's."""


def strays(contents: Contents, named: set[str], heads: Mapping[str, LogCursor]) -> list[Stray]:
    """All strays, sorted by path. `named` are the files that records name, `heads` the ends of the logs that are sound.

    What belongs to a log that is not in `heads` is left out: who knows what its other records name.
    """
    found = _temporary(contents)
    for entry in contents.entries.values():
        if entry.path not in named and (stray := _stray(contents, entry, heads)) is not None:
            found.append(stray)
    return sorted(found, key=lambda stray: stray.path)


def is_temporary(path: str) -> bool:
    """Whether a path is that of an unfinished write, or lies in a temporary folder."""
    return any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/"))


def _stray(contents: Contents, entry: Entry, heads: Mapping[str, LogCursor]) -> Stray | None:
    path = entry.path
    if path in _FILES or path.startswith(tuple(f"{folder}/" for folder in _FOLDERS)) or is_temporary(path):
        return None
    if path.startswith(f"{layout.PROBE}/"):
        return _garbage(entry, "left by a test of the store")
    if found := _SEGMENT.fullmatch(path):
        if found["log"] not in heads:
            return None
        head = heads[found["log"]]
        over = int(found["epoch"]) < head.epoch or head.ended
        reason = "never committed" if over else "not committed yet: its writer may still be at it"
        return Stray(path=path, bytes=entry.bytes, t_modified=entry.t_modified, reason=reason, garbage=over)
    folder, _, name = path.rpartition("/")
    logs = {stream.path for stream in contents.streams} | set(layout.FILE_LOGS)
    if (folder in logs and name in (layout.HEAD, layout.REMOVED)) or (is_record(path) and folder[:-4] in logs):
        return None
    if found := _CHECKPOINT_FILE.fullmatch(path):
        if found["log"] not in heads:
            return None
        beside = contents.below(f"{found['log']}/{found['folder']}")
        newest = max(other.t_modified for other in beside)
        return Stray(path=path, bytes=entry.bytes, t_modified=newest, reason="never committed", garbage=True)
    return Stray(path=path, bytes=entry.bytes, t_modified=entry.t_modified, reason="not a file of a run", garbage=False)


def _garbage(entry: Entry, reason: str) -> Stray:
    return Stray(path=entry.path, bytes=entry.bytes, t_modified=entry.t_modified, reason=reason, garbage=True)


def _temporary(contents: Contents) -> list[Stray]:
    """Unfinished writes, which only a local store can leave, and never lists."""
    root = contents.store.local_path("")
    if root is None:
        return []
    tops = [path for path in root.rglob(f"{TEMPORARY_PREFIX}*") if not is_temporary(str(path.parent.relative_to(root)))]
    return [_temporary_stray(root, path) for path in tops]


def _temporary_stray(root: Path, path: Path) -> Stray:
    stats = [found.stat() for found in (path, *path.rglob("*")) if found.exists()]
    return Stray(
        path=path.relative_to(root).as_posix(),
        bytes=sum(stat.st_size for stat in stats),
        t_modified=max((stat.st_mtime for stat in stats), default=0.0),
        reason="a write that was cut off",
        garbage=True,
    )
