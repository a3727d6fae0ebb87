"""A person's note on a run: `note.txt`, one line. No stage reads it."""

from millrace.errors import InputError
from millrace.runs.record import read_run
from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store

MAX_CHARACTERS = 500


def read_note(store: Store) -> str:
    """The note on the run in `store`; '' if there is none. Raises what an unreachable store raises."""
    try:
        data = bytes(store.get(layout.NOTE, 0, 4 * MAX_CHARACTERS))
    except NotInStore:
        return ""
    # Someone may have written it by hand.
    return " ".join(data.decode("utf-8", "replace").split())[:MAX_CHARACTERS]


def write_note(store: Store, text: str) -> None:
    """Replaces the note on the run in `store`; an empty one removes it. Line breaks become spaces.

    Raises RunMissing if there is no run, and InputError for more than 500 characters.
    """
    read_run(store)
    line = " ".join(text.split())
    if len(line) > MAX_CHARACTERS:
        raise InputError(f"the note has {len(line)} characters: expected at most {MAX_CHARACTERS}")
    if line:
        store.put(layout.NOTE, line.encode("utf-8", "replace"))
    else:
        store.delete(layout.NOTE)
