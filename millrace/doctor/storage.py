"""Free space, and whether the store of runs keeps its promises."""

import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from millrace.doctor.host import GIB
from millrace.doctor.line import Line
from millrace.doctor.machine import Machine, existing
from storage.errors import StorageError
from storage.stores.base import probe
from storage.stores.factory import open_store

_LEAST_FREE = GIB


def storage_lines(machine: Machine, root: str) -> Iterator[Line]:
    """`root`: folder or URL under which runs are stored. Nothing stays behind there."""
    folder = None
    # What is wrong with it, the line about the store says.
    with suppress(StorageError, ValueError):
        folder = open_store(root).local_path("")
    if folder is not None:
        yield _space(machine, "space for runs", folder, "millrace gc frees space in a run; or choose another --root.")
    yield _space(machine, "temporary files", Path(tempfile.gettempdir()), "Free some, or set TMPDIR.")
    yield _store(root, folder)


def _space(machine: Machine, what: str, folder: Path, remedy: str) -> Line:
    room = machine.room(folder)
    free = 0 if room is None else room.free
    fine = free >= _LEAST_FREE
    return Line(
        group="storage",
        what=what,
        found=f"{free / GIB:.1f} GiB free at {existing(folder)}",
        state="ok" if fine else "wrong",
        needed=True,
        remedy="" if fine else remedy,
    )


def _store(root: str, folder: Path | None) -> Line:
    # A run creates its root; a diagnosis does not.
    place = root if folder is None else str(existing(folder))
    try:
        probe(open_store(place))
    except (StorageError, ValueError) as error:
        return Line(
            group="storage",
            what="store",
            found=str(error),
            state="wrong",
            needed=True,
            remedy="Choose another --root, or see docs/data.md, Where a run is stored.",
        )
    found = f"{root}: read, written, and what exists is not created again"
    return Line(group="storage", what="store", found=found, state="ok", needed=True)
