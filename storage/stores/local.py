"""A store on a file system of this machine.

    put_if_absent   .tmp-x ── write, fsync ──► link(.tmp-x, name) ──► unlink .tmp-x ──► fsync folder ──► True
                                                     └─ name exists ──► unlink .tmp-x ─────────────────► False
    put             .tmp-x ── write ──► replace(.tmp-x, name)

`link` is the only call of POSIX that publishes a finished file under a name and fails if the name is taken.
"""

import errno
import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import BadName, NotInStore, StorageError, StoreDenied, StoreFull, StoreRefused, StoreUnreachable
from storage.failpoints import failpoint
from storage.stores.base import TEMPORARY_PREFIX, BytesLike, Entry, Store, checked_path

_LONGEST_SHOWN = 200
_KINDS: dict[int, type[StorageError]] = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), StoreFull),
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), StoreDenied),
    errno.ENAMETOOLONG: BadName,
    errno.EIO: StoreUnreachable,
}
_MAP_FROM_BYTES = 1 << 20
"""Smaller files are read: a mapping holds a file descriptor, and copying 1 MiB takes 0.1 ms."""


class LocalStore(Store):
    """Objects are files below `root`, which the first write creates.

    `fsync=False` gives up durability and nothing else, so that benchmarks can measure its cost.
    """

    poll_seconds = 0.002

    def __init__(self, root: Path | str, *, fsync: bool = True) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._fsync = fsync
        self._durable_folders: set[Path] = set()
        self._anchor: Path | None = None

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        target = self._at(path)
        failpoint("put.before", path)
        with self._working(path, "written"):
            self._make_durable_folder(target.parent)
            with _temporary_file(target.parent, data, fsync=self._fsync) as temporary:
                failpoint("put.mid", path)
                try:
                    target.hardlink_to(temporary)
                except FileExistsError:
                    return False
            if self._fsync:
                _fsync_folder(target.parent)
        failpoint("put.after", path)
        return True

    def put(self, path: str, data: BytesLike) -> None:
        target = self._at(path)
        failpoint("put.before", path)
        with self._working(path, "written"):
            self._make_durable_folder(target.parent)
            with _temporary_file(target.parent, data, fsync=False) as temporary:
                failpoint("put.mid", path)
                temporary.replace(target)
        failpoint("put.after", path)

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        # A string: a Path from `_at` takes almost as long as the rest of a small read.
        target = f"{self.root}/{checked_path(path)}"
        try:
            with self._working(path, "read"), _opened(target) as descriptor:
                size = os.fstat(descriptor).st_size
                stop = size if length is None else min(size, start + length)
                if stop - start < _MAP_FROM_BYTES:
                    return memoryview(os.pread(descriptor, max(0, stop - start), start))
                # Safe to map: a published file is never written to again, only replaced.
                return memoryview(mmap.mmap(descriptor, 0, access=mmap.ACCESS_READ))[start:stop]
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotInStore(f"not in {self.url}", file=path) from error

    def exists(self, path: str) -> bool:
        target = self._at(path)
        with self._working(path, "read"):
            return target.is_file()

    def entries(self, prefix: str = "") -> list[Entry]:
        entries = []
        with self._working(prefix or "its root", "listed"):
            for folder, _, names in os.walk(self._at(prefix) if prefix else self.root, onerror=_raise_unless_gone):
                for name in names:
                    if name.startswith(TEMPORARY_PREFIX):
                        continue
                    path = Path(folder) / name
                    # A file that disappears while we walk counts as absent.
                    with suppress(FileNotFoundError):
                        status = path.stat()
                        relative = path.relative_to(self.root).as_posix()
                        entries.append(Entry(path=relative, bytes=status.st_size, t_modified=status.st_mtime))
        return sorted(entries, key=lambda entry: entry.path)

    def folders(self, prefix: str = "") -> list[str]:
        with self._working(prefix or "its root", "listed"):
            try:
                with os.scandir(self._at(prefix) if prefix else self.root) as entries:
                    return sorted(entry.name for entry in entries if entry.is_dir())
            except (FileNotFoundError, NotADirectoryError):
                return []

    def delete(self, path: str) -> None:
        target = self._at(path)
        with self._working(path, "deleted"), suppress(FileNotFoundError, NotADirectoryError):
            target.unlink()

    def delete_tree(self, prefix: str) -> None:
        folder = self._at(prefix)
        with self._working(prefix, "deleted"):
            while folder.is_dir():
                # Another process may delete in the same folder at the same time; retry for the rest.
                with suppress(FileNotFoundError):
                    shutil.rmtree(folder)
        self._durable_folders = {kept for kept in self._durable_folders if not kept.is_relative_to(folder)}

    def local_path(self, path: str) -> Path:
        return self._at(path) if path else self.root

    def _at(self, path: str) -> Path:
        return self.root / checked_path(path)

    @contextmanager
    def _working(self, path: str, done: str) -> Iterator[None]:
        """Turns errors of the file system into storage errors; `done` completes "can't be …"."""
        try:
            yield
        except OSError as error:
            kind = _KINDS.get(error.errno or 0)
            if kind is None and done == "written":
                is_taken = error.errno in (errno.EEXIST, errno.ENOTDIR, errno.EISDIR)
                # In /proc no root can be made, which is "no such file".
                kind = StoreRefused if is_taken or not self.root.exists() else None
            if kind is None:
                raise
            url = self.url if len(self.url) <= _LONGEST_SHOWN else f"{self.url[:_LONGEST_SHOWN]}…"
            is_full = kind is StoreFull
            read = f"no room left to write {path}" if is_full else f"{path} can't be {done}: {error.strerror or error}"
            raise kind(read, file=url) from error

    def _make_durable_folder(self, folder: Path) -> None:
        """A file's name survives a power cut only if every folder above it does."""
        if self._anchor is None:
            # Folders that existed before are not ours to make durable, and may not even be readable.
            self._anchor = next(level for level in (self.root, *self.root.parents) if level.is_dir())
        folder.mkdir(parents=True, exist_ok=True)
        if not self._fsync or folder in self._durable_folders:
            return
        for level in (folder, *folder.parents):
            _fsync_folder(level)
            if level == self._anchor:
                break
        self._durable_folders.add(folder)


def _raise_unless_gone(error: OSError) -> None:
    if not isinstance(error, FileNotFoundError | NotADirectoryError):
        raise error


@contextmanager
def _temporary_file(folder: Path, data: BytesLike, *, fsync: bool) -> Iterator[Path]:
    """A file in `folder` that holds `data`, gone afterwards unless renamed."""
    temporary = folder / f"{TEMPORARY_PREFIX}{uuid.uuid4().hex}"
    try:
        with temporary.open("xb") as file:
            file.write(data)
            if fsync:
                file.flush()
                os.fsync(file.fileno())
        yield temporary
    finally:
        temporary.unlink(missing_ok=True)


def _fsync_folder(folder: Path) -> None:
    with _opened(folder, os.O_DIRECTORY) as descriptor:
        os.fsync(descriptor)


@contextmanager
def _opened(path: Path | str, flags: int = 0) -> Iterator[int]:
    """A file or folder opened for reading: its descriptor."""
    descriptor = os.open(path, os.O_RDONLY | flags)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
