"""Damaged files are moved aside, never thrown away: their readers then see them as missing, and go on without them.

    FILE ──copy──► quarantine/FILE, compared ──► quarantine/FILE.json: why, when, named by which record ──► FILE deleted

A crash in between leaves the file at both places; doing it again finishes it.
"""

import json
import time
from dataclasses import asdict, dataclass

from millrace.care.contents import Contents
from millrace.errors import InputError
from storage import layout
from storage.errors import NotInStore
from storage.store import Store


@dataclass(frozen=True, kw_only=True)
class Note:
    """What lies beside a file in quarantine."""

    file: str
    """Where it lay, relative to the run."""
    reason: str
    """What is wrong with it."""
    record: int | None
    """Sequence number of the commit record that names it."""
    t: float
    """When it was moved, unix seconds."""


def set_aside(store: Store, file: str, *, reason: str, record: int | None) -> None:
    """Moves a file to `quarantine/`; of one that is missing already, only the note is left there.

    Raises InputError where another file of that name is in quarantine, and then moves nothing.
    """
    target = f"{layout.QUARANTINE}/{file}"
    try:
        data = store.get(file)
    except NotInStore:
        data = None
    if data is not None and not store.put_if_absent(target, data) and store.get(target) != data:
        raise InputError(f"{store.url}: {target} holds another damaged file of this name: expected it to be moved away")
    if data is not None and store.get(target) != data:
        raise InputError(
            f"{store.url}: {target} does not read back as {file}: expected a store that keeps what it gets"
        )
    note = Note(file=file, reason=reason, record=record, t=time.time())
    store.put(f"{target}.json", json.dumps(asdict(note), indent=1, sort_keys=True).encode())
    store.delete(file)


def read_note(contents: Contents, file: str) -> Note | None:
    """What the quarantine says of a file that is not at its place any more; None where it says nothing."""
    path = f"{layout.QUARANTINE}/{file}.json"
    if path not in contents.entries or file in contents.entries:
        return None
    return Note(**json.loads(bytes(contents.store.get(path))))
