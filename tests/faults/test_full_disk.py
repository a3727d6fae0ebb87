"""A disk that fills up while a writer commits: what was acknowledged is there, and room is all it takes to go on.

|■■■■■■■■■ ballast ■■■■■■■■■|▒▒▒ k free pages ▒▒▒|      a part takes two: its own file's and its record's
"""

import errno
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest
from support.streams.numbered import PATH, numbered, open_reader, take_numbers

from storage.errors import StoreFull
from storage.schema import METRIC
from storage.stores.base import TEMPORARY_PREFIX
from storage.stores.local import LocalStore
from storage.streams.stream import StreamWriter

AT_START = 3
ROWS = 70
"""More than lie between two snapshots."""
PAGE = 4096
"""The unit of a tmpfs, bytes."""


class Ballast:
    """Fills the disk that is mounted at `disk` up to `free_pages` pages. For a disk whose unit is the page: a tmpfs."""

    def __init__(self, disk: Path, free_pages: int) -> None:
        self._file = disk / "ballast"
        self.leave_free(free_pages)

    def leave_free(self, pages: int) -> None:
        """Sizes the ballast so that exactly `pages` pages are free."""
        with self._file.open("ab", buffering=0) as file:
            try:
                while True:
                    file.write(bytes(PAGE))
            except OSError as error:
                if error.errno != errno.ENOSPC:
                    raise
        os.truncate(self._file, self._file.stat().st_size - pages * PAGE)

    def remove(self) -> None:
        self._file.unlink()


def open_writer(store: LocalStore) -> StreamWriter:
    return StreamWriter(store, PATH, METRIC, "w")


def write_until_full(writer: StreamWriter) -> str:
    """Commits rows one by one; what the store said in the end."""
    with pytest.raises(StoreFull) as full:
        while True:
            writer.write(numbered(writer.rows, 1), tokens=0)
    return str(full.value)


def unfinished(disk: Path) -> list[Path]:
    return [path for path in disk.rglob("*") if path.name.startswith(TEMPORARY_PREFIX)]


@pytest.mark.parametrize("pages", range(6))
@pytest.mark.parametrize("reopened", [False, True], ids=["same writer", "new writer"])
def test_a_full_disk_keeps_what_was_acknowledged_and_room_is_enough_to_go_on(
    make_small_disk: Callable[[int], Path], pages: int, reopened: bool
) -> None:
    disk = make_small_disk(2)
    store = LocalStore(disk / "run")
    writer = open_writer(store)
    for row in range(AT_START):
        writer.write(numbered(row, 1), tokens=0)
    ballast = Ballast(disk, free_pages=pages)
    said = write_until_full(writer)
    place = "log" if pages % 2 else "seg"
    assert f"{disk}/run: no room left to write {PATH}/{place}/" in said
    committed = AT_START + pages // 2
    assert (writer.rows, take_numbers(open_reader(store))) == (committed, list(range(committed)))
    assert len(store.list(f"{PATH}/log")) == 1 + committed
    assert len(store.list(f"{PATH}/seg")) == committed + pages % 2, "at most one whole part file that nothing names"
    assert unfinished(disk) == []
    ballast.remove()
    if reopened:
        writer = open_writer(store)
    for _ in range(5):
        writer.write(numbered(writer.rows, 1), tokens=0)
    assert take_numbers(open_reader(store)) == list(range(committed + 5))


def test_a_disk_that_is_full_at_each_commit_loses_and_repeats_nothing(
    make_small_disk: Callable[[int], Path],
) -> None:
    disk = make_small_disk(2)
    store = LocalStore(disk / "run")
    writer = open_writer(store)
    ballast = Ballast(disk, free_pages=0)
    found_no_room: Counter[str] = Counter()
    for row in range(ROWS):
        ballast.leave_free(1)
        said = write_until_full(writer)
        found_no_room[said.split(f"write {PATH}/")[1].split("/")[0]] += 1
        assert writer.rows == row
        # One page each for the part file, the record, and the snapshot where it is due.
        ballast.leave_free(3)
        writer.write(numbered(row, 1), tokens=0)
    assert found_no_room == {"log": ROWS - 1, "head.json": 1}
    assert take_numbers(open_reader(store)) == list(range(ROWS))
    assert unfinished(disk) == []
