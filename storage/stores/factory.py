"""Opens the backend that a store's URL names."""

from pathlib import Path
from urllib.parse import unquote

from storage.errors import StoreRefused
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore


def open_store(url: str, *, fsync: bool = True) -> Store:
    """Open the store at `url`: a plain path, `file:///path`, `memory://name` or `s3://bucket/prefix`.

    Opening reads and writes no object. `fsync=False` gives up durability where the store is a local folder.
    Raises StoreRefused for any other URL, for one that holds credentials, and for S3 settings that can't be used.

    Examples:
        >>> store = open_store("memory://example")
        >>> store.put_if_absent("notes/first", b"hello"), store.put_if_absent("notes/first", b"again")
        (True, False)
        >>> bytes(store.get("notes/first"))
        b'hello'
        >>> store.delete_tree("notes")
    """
    if not url:
        raise StoreRefused("the store's URL is empty: expected a path, file://, memory:// or s3://")
    if "://" not in url:
        return LocalStore(Path(url).expanduser(), fsync=fsync)
    scheme, _, rest = url.partition("://")
    host, _, path = rest.partition("/")
    if scheme == "file" and host in ("", "localhost"):
        return LocalStore(Path("/", unquote(path)), fsync=fsync)
    if scheme == "memory":
        return MemoryStore(rest)
    if scheme == "s3":
        # Imported late: most runs are in a folder and need no S3 client.
        from storage.stores.object_store import ObjectStore

        return ObjectStore(url)
    # The text before an '@' may be a secret.
    shown = f"{scheme}://…@{rest.rpartition('@')[2]}" if "@" in url else url
    raise StoreRefused(
        f"{shown.partition('?')[0]!r}: this kind of store is not supported; "
        "expected a path, file:///path, memory://name or s3://bucket/prefix"
    )
