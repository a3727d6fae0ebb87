"""A store on a file system of this machine.

    put_if_absent   .tmp-x ── write, fsync ──► link(.tmp-x, name) ──► unlink .tmp-x ──► fsync folder ──► True
                                                     └─ name exists ──► unlink .tmp-x ─────────────────► False
    put             .tmp-x ── write ──► replace(.tmp-x, name)

`link` is the only call of POSIX that publishes a finished file under a name and fails if the name is taken.
"""

import mmap
import os
import shutil
import uuid
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from storage.errors import NotInStore
from storage.store import TEMPORARY_PREFIX, BytesLike, Store, checked_path

_MAP_FROM_BYTES = 1 << 20
"""Smaller files are read: a mapping holds a file descriptor, and copying a mebibyte takes a tenth of a millisecond."""


class LocalStore(Store):
    """Objects are files below `root`, which the first write creates.

    `fsync=False` gives durability up, and nothing else, so that benchmarks can price it.
    """

    def __init__(self, root: Path | str, *, fsync: bool = True) -> None:
        self.root = Path(root).absolute()
        self.url = str(self.root)
        self._fsync = fsync
        self._durable_folders: set[Path] = set()
        self._anchor: Path | None = None

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        target = self._at(path)
        self._make_durable_folder(target.parent)
        with _temporary_file(target.parent, data, fsync=self._fsync) as temporary:
            try:
                target.hardlink_to(temporary)
            except FileExistsError:
                return False
        if self._fsync:
            _fsync_folder(target.parent)
        return True

    def put(self, path: str, data: BytesLike) -> None:
        target = self._at(path)
        self._make_durable_folder(target.parent)
        with _temporary_file(target.parent, data, fsync=False) as temporary:
            temporary.replace(target)

    def get(self, path: str) -> memoryview:
        try:
            with self._at(path).open("rb") as file:
                if os.fstat(file.fileno()).st_size < _MAP_FROM_BYTES:
                    return memoryview(file.read())
                # Safe to map: what is published under a name is never written to again, only replaced.
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError) as error:
            raise NotInStore(f"{path}: not in {self.url}") from error

    def exists(self, path: str) -> bool:
        return self._at(path).is_file()

    def list(self, prefix: str = "") -> list[str]:
        found = []
        for folder, _, names in os.walk(self._at(prefix) if prefix else self.root):
            relative = Path(folder).relative_to(self.root)
            found += [(relative / name).as_posix() for name in names if not name.startswith(TEMPORARY_PREFIX)]
        return sorted(found)

    def delete_tree(self, prefix: str) -> None:
        folder = self._at(prefix)
        if folder.is_dir():
            # Someone else deleting the same folder at the same time wants what we want.
            with suppress(FileNotFoundError):
                shutil.rmtree(folder)

    def local_path(self, path: str) -> Path:
        return self._at(path) if path else self.root

    def _at(self, path: str) -> Path:
        return self.root / checked_path(path)

    def _make_durable_folder(self, folder: Path) -> None:
        """A file's name survives a power cut only if every folder on the way to it does."""
        if self._anchor is None:
            # What was there before us is not ours to make durable, and may not even be ours to open.
            self._anchor = next(level for level in (self.root, *self.root.parents) if level.is_dir())
        folder.mkdir(parents=True, exist_ok=True)
        if not self._fsync or folder in self._durable_folders:
            return
        for level in (folder, *folder.parents):
            _fsync_folder(level)
            if level == self._anchor:
                break
        self._durable_folders.add(folder)


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
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
