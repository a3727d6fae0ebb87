"""Moves damaged files aside instead of deleting them. Readers then see them as missing and continue without them.

    FILE ──copy──► quarantine/FILE, compared ──► quarantine/FILE.json: why, when, named by which record ──► FILE deleted

A crash midway leaves the file in both places; running it again finishes the move.
"""

import json
import time

from millrace.errors import InputError
from millrace.maintenance.listing import Contents
from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store


def set_aside(store: Store, file: str, *, reason: str, record: int | None) -> None:
    """Moves a file to `quarantine/`. If the file is missing already, only the note is written there.

    `record` is the sequence number of the commit record that names the file; the note holds it, the reason and the
    time, unix seconds.

    Raises InputError if another file of that name is in quarantine, and then moves nothing.
    """
    target = f"{layout.QUARANTINE}/{file}"
    try:
        data = store.get(file)
    except NotInStore:
        data = None
    if data is not None:
        created = store.put_if_absent(target, data)
        if store.get(target) != data:
            problem = (
                f"does not read back as {file}: expected a store that keeps what it gets"
                if created
                else "holds another damaged file of this name: move it away first"
            )
            raise InputError(f"{store.url}: {target} {problem}")
    note = {"file": file, "reason": reason, "record": record, "t": time.time()}
    store.put(f"{target}.json", json.dumps(note, indent=1, sort_keys=True).encode())
    store.delete(file)


def reason_set_aside(contents: Contents, file: str) -> str | None:
    """Why a file is in quarantine; None if it is not, or is back in its old place."""
    path = f"{layout.QUARANTINE}/{file}.json"
    if path not in contents.entries or file in contents.entries:
        return None
    reason: str = json.loads(bytes(contents.store.get(path)))["reason"]
    return reason
