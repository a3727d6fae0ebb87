"""Files that a commit record names: written once under a fresh name, verified whole before anyone parses them."""

from dataclasses import dataclass
from typing import Protocol

import google_crc32c
import pyarrow as pa

from storage.errors import BadName, NotInStore, StreamCorrupt
from storage.store import BytesLike, Store

_CRC_BYTES = 16 << 20


class Source(Protocol):
    """What objects are read from: a store, or what gets them from one ahead of time."""

    def get(self, path: str) -> memoryview:
        """The object's bytes, read-only. Raises NotInStore."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRef:
    """What a record remembers of a file, enough to detect any damage to it."""

    path: str
    """Relative to the store's root."""
    bytes: int
    """Length of the file."""
    checksum: str
    """CRC-32C of the file, 8 hex digits."""


def put_file(store: Store, path: str, data: BytesLike) -> FileRef:
    """Write `data` durably at `path`, a name made for it alone. Raises StreamCorrupt if the name holds other bytes."""
    ref = FileRef(path=path, bytes=len(data), checksum=checksum(data))
    if not store.put_if_absent(path, data):
        # The name is ours alone, so "already there" is our own write whose reply was lost — or it is not ours.
        get_file(store, ref)
    return ref


def get_file(source: Source, ref: FileRef, *, record: int | None = None) -> memoryview:
    """The file's bytes, length and checksum verified. Raises StreamCorrupt, which names `record` as its referrer."""
    try:
        data = source.get(ref.path)
    except NotInStore as error:
        raise StreamCorrupt(ref.path, "the file is missing", record) from error
    except BadName as error:
        raise StreamCorrupt(ref.path, "no file can have this name", record) from error
    if len(data) != ref.bytes:
        raise StreamCorrupt(ref.path, f"the file has {len(data)} bytes, expected {ref.bytes}", record)
    found = checksum(data)
    if found != ref.checksum:
        raise StreamCorrupt(ref.path, f"the file's checksum is {found}, expected {ref.checksum}", record)
    return data


def checksum(data: BytesLike) -> str:
    """CRC-32C of `data` as 8 hex digits."""
    # The C extension refuses memoryviews; an Arrow buffer over one is read without a copy.
    buffer = pa.py_buffer(data)
    found = google_crc32c.value(b"")
    # Piece by piece: it holds Python's lock, and whoever trains or reads meanwhile must not wait for gigabytes.
    for start in range(0, buffer.size, _CRC_BYTES):
        found = google_crc32c.extend(found, buffer.slice(start, min(_CRC_BYTES, buffer.size - start)))
    return f"{found:08x}"
