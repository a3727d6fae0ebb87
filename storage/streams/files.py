"""Files that a commit record names: written once under a new name, verified completely before they are parsed."""

from dataclasses import dataclass
from typing import Protocol

import google_crc32c
import pyarrow as pa

from storage.errors import BadName, NotInStore, StreamCorrupt
from storage.stores.base import BytesLike, Store

_CRC_BYTES = 16 << 20


class Source(Protocol):
    """Where objects are read from: a store, or a prefetcher in front of one."""

    def get(self, path: str) -> memoryview:
        """The object's bytes, read-only. Raises NotInStore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRef:
    """A file as a record names it, with enough to detect any damage."""

    path: str
    """Relative to the store's root."""
    bytes: int
    """Length of the file."""
    checksum: str
    """CRC-32C of the file, 8 hex digits."""


def put_file(store: Store, path: str, data: BytesLike) -> FileRef:
    """Write `data` durably at `path`, a unique name. Raises StreamCorrupt if the path holds other bytes."""
    ref = FileRef(path=path, bytes=len(data), checksum=checksum(data))
    if not store.put_if_absent(path, data):
        # The name is unique, so "already there" is our own write whose reply was lost, or damage.
        get_file(store, ref)
    return ref


def get_file(source: Source, ref: FileRef, *, record: int | None = None) -> memoryview:
    """The file's bytes, length and checksum verified. Raises StreamCorrupt, naming `record`.

    What does not fit is read once more: it may have been damaged on the way here.
    """
    problem: str | None = None
    for _ in range(2):
        try:
            data = source.get(ref.path)
        except NotInStore as error:
            raise StreamCorrupt(ref.path, "the file is missing", record) from error
        except BadName as error:
            raise StreamCorrupt(ref.path, "no file can have this name", record) from error
        if (problem := _misfit(data, ref)) is None:
            return data
    assert problem is not None
    raise StreamCorrupt(ref.path, problem, record)


def _misfit(data: BytesLike, ref: FileRef) -> str | None:
    if len(data) != ref.bytes:
        return f"the file has {len(data)} bytes, expected {ref.bytes}"
    actual = checksum(data)
    return None if actual == ref.checksum else f"the file's checksum is {actual}, expected {ref.checksum}"


def checksum(data: BytesLike) -> str:
    """CRC-32C of `data` as 8 hex digits."""
    # The C extension refuses memoryviews; an Arrow buffer over one is read without a copy.
    buffer = pa.py_buffer(data)
    crc = google_crc32c.value(b"")
    # In pieces: it holds the GIL, and other threads must not wait for gigabytes.
    for start in range(0, buffer.size, _CRC_BYTES):
        crc = google_crc32c.extend(crc, buffer.slice(start, min(_CRC_BYTES, buffer.size - start)))
    return f"{crc:08x}"
