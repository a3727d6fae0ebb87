"""A hint at the head of a log, so that it need not be read from the start: `<path>/head.json`.

    writer, every 64 records   cursor ──► head.json, replaced
    opening at the head        head.json ──► fits its checksum? ──► matches that record? ──► continue from there
                                                    └── no ──────────────────┴── no ──► read the log from its start
    nothing at number n        head.json is past n ──► a record is missing: an error instead of silence

It is written without a commit, so it may be old, missing, damaged, or left over from a lost log. It makes reading
faster, and distinguishes a missing record from one that is not committed yet; no value depends on it.
"""

from typing import Any

from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store
from storage.streams.files import Source
from storage.streams.sealed import seal, unseal

EVERY = 64
"""Records between two snapshots: about the most that opening at the head reads."""


def write_snapshot(store: Store, path: str, cursor: dict[str, Any]) -> None:
    """Replace the snapshot of the log in the folder `path` by `cursor`, a JSON object."""
    store.put(f"{path}/{layout.HEAD}", seal({"cursor": cursor}))


def read_snapshot(source: Source, path: str) -> dict[str, Any] | None:
    """Reads the last snapshot; None if it is missing or damaged."""
    try:
        values = unseal(bytes(source.get(f"{path}/{layout.HEAD}")))
    except (NotInStore, ValueError):
        return None
    cursor = values.get("cursor")
    return cursor if isinstance(cursor, dict) else None
