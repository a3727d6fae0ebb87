"""Which backend a store's URL stands for."""

from pathlib import Path
from urllib.parse import unquote, urlsplit

from storage.errors import StoreRefused
from storage.local import LocalStore
from storage.memory import MemoryStore
from storage.store import Store


def open_store(url: str, *, fsync: bool = True) -> Store:
    """Open the store at `url`: a plain path, `file:///path`, or `memory://name` (this process only, for tests).

    Opening reads and writes nothing. `fsync=False` gives up durability where the store is a local folder.
    Raises StoreRefused for any other scheme.
    """
    if not url:
        raise StoreRefused("the store's URL is empty: expected a path, file:// or memory://")
    if "://" not in url:
        return LocalStore(Path(url).expanduser(), fsync=fsync)
    parts = urlsplit(url)
    if parts.scheme == "file" and parts.netloc in ("", "localhost"):
        return LocalStore(Path(unquote(parts.path)), fsync=fsync)
    if parts.scheme == "memory":
        return MemoryStore(url.removeprefix("memory://"))
    raise StoreRefused(f"{url!r}: this kind of store is not supported; expected a path, file:///path or memory://name")
