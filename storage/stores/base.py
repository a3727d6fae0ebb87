"""Where a run is stored: the one small interface that every backend implements.

                     put_if_absent   put        get / exists     entries        delete
    protocol         durable, once   –          by exact path    never          never
    status records   –               replaces   by exact path    –              –
    people, folders  –               –          –                sorted walk    `millrace gc` only

The commit protocol rests on `put_if_absent` alone, and stores fail open: one that ignores the condition overwrites
silently. So `probe` tries it before a run trusts a store.
"""

import uuid
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from storage import layout
from storage.errors import BadName, StorageError, StoreRefused

BytesLike = bytes | bytearray | memoryview

TEMPORARY_PREFIX = ".tmp-"
"""File names with this prefix are unfinished writes: never listed, never addressed."""
_NOT_NAMES = frozenset(("", ".", ".."))


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """One object, as a listing shows it."""

    path: str
    """Relative to the store's root."""
    bytes: int
    t_modified: float
    """Unix seconds, by the store's clock."""


class Store(ABC):
    """A place for objects, addressed by '/'-separated paths relative to its root.

    Every method raises `BadName` for a path that leaves the root, `StoreDenied`, `StoreFull` or `StoreUnreachable`
    where the backend says so, and another OSError where it fails otherwise. No error and no `url` shows a secret.
    """

    url: str
    """Opens the same place again through `open_store`."""
    poll_seconds: float
    """How often a reader that waits for an object should look again."""

    @abstractmethod
    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        """Create `path` with `data` unless something is already there.

        True: this call created it, whole and durable on return. False: something is there, and stays as it was.
        """

    @abstractmethod
    def put(self, path: str, data: BytesLike) -> None:
        """Create or replace `path` atomically. Not durable: for status records and summaries."""

    @abstractmethod
    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        """The object's bytes, read-only, or `length` of them from `start` on (fewer at its end). Raises NotInStore."""

    @abstractmethod
    def exists(self, path: str) -> bool:
        """Whether there is an object (not a folder) at `path`."""

    @abstractmethod
    def entries(self, prefix: str = "") -> list[Entry]:
        """Every object below the folder `prefix` ('' is the root), sorted by path.

        For people and for housekeeping; listings of object stores lag, so the protocol never uses it.
        """

    def list(self, prefix: str = "") -> Sequence[str]:
        """The paths of `entries`."""
        return [entry.path for entry in self.entries(prefix)]

    def folders(self, prefix: str = "") -> Sequence[str]:
        """The names of the folders directly below the folder `prefix` ('' is the root) that hold an object, sorted.

        For people, as `entries`. A local store names its empty folders too.
        """
        start = len(prefix) + 1 if prefix else 0
        below = [entry.path[start:].split("/") for entry in self.entries(prefix)]
        return sorted({names[0] for names in below if len(names) > 1})

    @abstractmethod
    def delete(self, path: str) -> None:
        """Delete the object at `path`, if there is one."""

    @abstractmethod
    def delete_tree(self, prefix: str) -> None:
        """Delete every object below the folder `prefix`, if there are any."""

    @abstractmethod
    def local_path(self, path: str) -> Path | None:
        """The local file of `path` ('' is the root), whether or not it exists yet; None if the store is not local."""


def checked_path(path: str) -> str:
    """`path` unchanged if it is a plain path below a store's root. Raises BadName."""
    is_plain = path.isprintable() and f"/{TEMPORARY_PREFIX}" not in f"/{path}"
    if not is_plain or not _NOT_NAMES.isdisjoint(path.split("/")):
        expected = f"printable names joined by '/', none of them empty, '.', '..' or starting with '{TEMPORARY_PREFIX}'"
        raise BadName("not a path inside a store", file=repr(path), expected=expected)
    return path


def probe(store: Store) -> None:
    """Check that `store` can be read and written and creates exclusively, before a run trusts it. Leaves nothing.

    Raises StoreRefused.
    """
    # A separate folder per probe: another campaign may probe the same store at the same time.
    folder = f"{layout.PROBE}-{uuid.uuid4().hex}"
    path = f"{folder}/created-twice"
    with _refusing(store, "can't be read"):
        # Fails if the store can't distinguish an absent object from a forbidden one.
        existed = store.exists(path)
    with _refusing(store, "can't be written"):
        try:
            created = (store.put_if_absent(path, b"first"), store.put_if_absent(path, b"second"))
            content = bytes(store.get(path))
        finally:
            store.delete_tree(folder)
    # created[0] may be False: if the first reply was lost, the retry finds our own file and reports "exists already".
    if existed or created[1] or content != b"first":
        raise StoreRefused(
            f"not safe for a run: looking for a file and creating it twice returned {(existed, *created)} and left "
            f"{content!r}",
            file=store.url,
            expected=f"{(False, True, False)} and the first content",
        )


@contextmanager
def _refusing(store: Store, what: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        reason = error.read if isinstance(error, StorageError) else error.strerror
        raise StoreRefused(f"{what}: {reason}", file=store.url) from error
