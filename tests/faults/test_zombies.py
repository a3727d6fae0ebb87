"""A writer that sleeps through a takeover, in a real process: it wakes, commits nothing, and stops for good.

old    write … SIGSTOP at a place ─────────────────────────── SIGCONT ──► writes ──► Fenced, exit 76
new                               open (fence), write 10 rows          write 10 rows
"""

import random
from pathlib import Path

import pytest
from support.stages.failpoints import Failpoints, go_on, wait_until_stopped
from support.streams.numbered import PATH, numbered, open_reader, take_numbers
from support.streams.writer_process import acknowledged, running_writer

from millrace.errors import FENCED
from storage import layout
from storage.schema import METRIC
from storage.stores.base import TEMPORARY_PREFIX
from storage.stores.local import LocalStore
from storage.streams.log import LogReader
from storage.streams.stream import StreamWriter

SEEDS = (0,)
STORM_SEEDS = range(1, 6)
FILES = (f"{PATH}/seg/*", f"{PATH}/log/*", f"{PATH}/{layout.HEAD}")
PLACES = [f"put.{moment}:{file}" for file in FILES for moment in ("before", "mid", "after")]


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["parts", "grouped"])
def test_a_stopped_writer_that_wakes_after_a_takeover_commits_nothing(
    how: str, place: str, seed: int, tmp_path: Path
) -> None:
    # The first record is the fence: from the third time on, rows have been committed before. A snapshot comes late.
    nth = 1 if place.endswith(layout.HEAD) else random.Random(f"{seed} {how} {place}").randint(3, 12)
    failpoints = Failpoints(tmp_path / "fired", f"old {place} {nth} stop")
    store = LocalStore(tmp_path / "store")
    with running_writer(tmp_path / "store", "old", how, failpoints) as old:
        assert wait_until_stopped(old), f"seed {seed}: it ended with {old.wait()} before it was stopped"
        assert failpoints.missed() == []
        new = StreamWriter(store, PATH, METRIC, "new")
        before = new.rows
        for _ in range(5):
            new.write(numbered(new.rows, 2, "new"), tokens=0)
        go_on(old)
        rows = acknowledged(old)
        assert old.wait() == FENCED, f"seed {seed}"
    assert 0 < rows <= before, f"seed {seed}: {rows} rows acknowledged, {before} committed before the takeover"
    for _ in range(5):
        new.write(numbered(new.rows, 2, "new"), tokens=0)
    assert take_numbers(open_reader(store)) == list(range(before + 20)), f"seed {seed}"
    records = list(iter(LogReader(store, PATH).next, None))
    takeover = next(record.seq for record in records if record.writer == "new")
    assert {record.writer for record in records[:takeover]} == {"old"}
    assert {record.writer for record in records[takeover:]} == {"new"}, f"seed {seed}: the zombie committed"
    assert StreamWriter(store, PATH, METRIC, "newest").rows == before + 20, "as the zombie's snapshot leads to the head"
    assert not [file for file in (tmp_path / "store").rglob("*") if file.name.startswith(TEMPORARY_PREFIX)]
