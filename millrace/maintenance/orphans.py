"""Files that killed processes left in a run, and that no record names.

seg/<epoch>-….arrows    a part whose writer died before the commit
data/<step>-…/NAME      a file of a checkpoint, a weights version or a promoted model that was never committed
.tmp-…                  a local write that was never renamed to its final name

All other files belong to someone else: they are neither reported nor touched.
"""

import re
from collections.abc import Iterator
from contextlib import suppress

from millrace.maintenance.contents import Contents
from storage import layout
from storage.checkpoints import checkpoint_of
from storage.errors import StreamCorrupt
from storage.stores.base import TEMPORARY_PREFIX, Entry

_PART = re.compile(r"(?P<log>.+)/seg/(?P<epoch>\d+)-[^/]+\.arrows")
_CHECKPOINT_FILE = re.compile(rf"(?P<log>{'|'.join(layout.FILE_LOGS)})/data/[^/]+/.+")


def find_orphans(contents: Contents) -> list[tuple[Entry, str]]:
    """All orphans with the reason of each, sorted by path, once every log of the run was read.

    A temporary folder is one entry. A recent one may be of a process that still runs. Leaves out files of damaged logs,
    whose unreadable records may name them, and parts of a stream's newest writer, which may be about to commit them.
    """
    named = set(_named_files(contents))
    orphans = [(entry, "an interrupted write") for entry in _unfinished_writes(contents)]
    for entry in contents.entries.values():
        match = _PART.fullmatch(entry.path) or _CHECKPOINT_FILE.fullmatch(entry.path)
        log = contents.logs.get(match["log"]) if match and entry.path not in named else None
        if match and log is not None and log.damage is None:
            epoch = match.groupdict().get("epoch")
            if epoch is None or int(epoch) < log.head.epoch or log.head.ended:
                orphans.append((entry, "never committed"))
    return sorted(orphans, key=lambda orphan: orphan[0].path)


def is_temporary(path: str) -> bool:
    """Whether a path is that of an unfinished write, or inside a temporary folder."""
    return any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/"))


def _named_files(contents: Contents) -> Iterator[str]:
    for path, log in contents.logs.items():
        yield from (f"{path}/{record.file}" for record in log.parts)
        for record in log.records:
            if record.kind == "checkpoint":
                with suppress(StreamCorrupt):
                    yield from (ref.path for ref in checkpoint_of(record, path).files.values())


def _unfinished_writes(contents: Contents) -> Iterator[Entry]:
    """Temporary files and folders, each with its contents. Only a local store can leave them."""
    root = contents.store.local_path("")
    if root is None:
        return
    for path in root.rglob(f"{TEMPORARY_PREFIX}*"):
        relative = path.relative_to(root)
        if not is_temporary(relative.parent.as_posix()):
            stats = [file.stat() for file in (path, *path.rglob("*")) if file.exists()]
            yield Entry(
                path=relative.as_posix(),
                bytes=sum(stat.st_size for stat in stats),
                t_modified=max((stat.st_mtime for stat in stats), default=0.0),
            )
