"""Prefetch while a reader catches up: parallel, verified in order, and one request per look at the head."""

import random
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pytest
from support.stores.slow_store import SlowStore

from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.schema import TRAJECTORY
from storage.streams.prefetch import DEPTH
from storage.streams.stream import StreamReader, StreamWriter

MakeTable = Callable[..., pa.Table]

STREAM = layout.trajectories(0)
REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def far(make_trajectories: MakeTable) -> SlowStore:
    """A far-away store with a stream of 40 parts of 4 rows, each get 5 ms away."""
    store = SlowStore()
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    for _ in range(40):
        writer.write(make_trajectories(writer.rows), tokens=0)
    store.gets.clear()
    store.latency = 0.005
    return store


def record(seq: int) -> str:
    return f"{STREAM}/{layout.record(seq)}"


def row_ids(reader: StreamReader) -> list[int]:
    return [row_id for part in iter(reader.next, None) for row_id in part.table.column("row_id").to_pylist()]


def test_catching_up_gets_each_object_once_eight_parts_at_a_time(far: SlowStore) -> None:
    assert row_ids(StreamReader(far, STREAM, TRAJECTORY)) == list(range(160))
    assert 4 <= far.most_at_once <= 2 * DEPTH
    counts = Counter(far.gets)
    assert {path: count for path, count in counts.items() if count > 1 and path in far.objects} == {}
    in_vain = [path for path in far.gets if path not in far.objects]
    assert len(in_vain) <= DEPTH + 3


def test_at_the_head_each_look_is_one_get(far: SlowStore, make_trajectories: MakeTable) -> None:
    reader = StreamReader(far, STREAM, TRAJECTORY)
    row_ids(reader)
    writer = StreamWriter(far, STREAM, TRAJECTORY, "w")
    assert reader.next() is None
    wait_for_threads()
    for _ in range(5):
        far.gets.clear()
        assert [reader.next() for _ in range(10)] == [None] * 10
        assert Counter(far.gets) == {record(reader.cursor.seq): 10}
        writer.write(make_trajectories(writer.rows), tokens=0)
        far.gets.clear()
        part = reader.next()
        assert part is not None
        assert far.gets == [record(part.record.seq), f"{STREAM}/{part.record.file}"]


def test_opening_at_the_head_makes_three_gets_and_each_look_one(far: SlowStore) -> None:
    first = StreamReader(far, STREAM, TRAJECTORY)
    row_ids(first)
    wait_for_threads()
    far.gets.clear()
    reader = StreamReader(far, STREAM, TRAJECTORY, first.cursor)
    assert (reader.next(), reader.next()) == (None, None)
    assert far.gets == [record(40), record(41), f"{STREAM}/{layout.HEAD}", record(41)]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(5))
def test_a_part_that_was_prefetched_too_early_is_read_at_the_next_look(seed: int, make_trajectories: MakeTable) -> None:
    store, chooser = SlowStore(), random.Random(seed)
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    reader = StreamReader(store, STREAM, TRAJECTORY)
    for _ in range(30):
        burst = chooser.randint(0, 12)
        for _ in range(burst):
            writer.write(make_trajectories(writer.rows), tokens=0)
        seen = chooser.randint(0, burst + 1)
        for _ in range(seen):
            behind = writer.rows - reader.cursor.rows
            assert (reader.next() is None) == (behind == 0), f"seed {seed}"
    assert row_ids(reader)[-1:] in ([writer.rows - 1], []), f"seed {seed}"
    assert reader.cursor.rows == writer.rows, f"seed {seed}"


def test_a_prefetch_error_is_raised_when_its_record_is_due(far: SlowStore) -> None:
    far.failing = {record(20): ConnectionError("no route")}
    reader = StreamReader(far, STREAM, TRAJECTORY)
    for part in range(19):
        result = reader.next()
        assert result is not None
        assert result.record.part == part
    assert not far.failing
    with pytest.raises(ConnectionError):
        reader.next()
    assert row_ids(reader) == list(range(76, 160))


def test_prefetched_parts_are_verified_in_order(far: SlowStore) -> None:
    reader = StreamReader(far, STREAM, TRAJECTORY)
    part_file = next(path for path in sorted(far.objects) if "/seg/" in path)
    far.objects[part_file] = far.objects[part_file][:-1] + b"\x01"
    read = 0
    with pytest.raises(PartCorrupt) as caught:
        while reader.next():
            read += 1
    assert caught.value.file == part_file
    assert caught.value.record == read + 1
    damaged = reader.next_record()
    assert damaged is not None
    assert f"{STREAM}/{damaged.file}" == part_file
    assert len(row_ids(reader)) == 4 * (39 - read)
    far.objects[record(30)] = far.objects[record(30)].replace(b'"rows": 4', b'"rows": 5')
    with pytest.raises(StreamCorrupt) as caught:
        for _ in iter(StreamReader(far, STREAM, TRAJECTORY).next_record, None):
            pass
    assert caught.value.file == record(30)


HANGING = """
import sys, threading
from support.stores.slow_store import SlowStore
from storage.stores.memory import MemoryStore
from storage.schema import METRIC
from storage.streams.stream import StreamReader, StreamWriter
from support.streams.numbered import numbered

class Hanging(SlowStore):
    def get(self, path, start=0, length=None):
        if threading.current_thread() is not threading.main_thread():
            threading.Event().wait()
        return super().get(path, start, length)

store = Hanging()
writer = StreamWriter(store, "s", METRIC, "w")
for _ in range(4):
    writer.write(numbered(writer.rows, 1), tokens=0)
reader = StreamReader(store, "s", METRIC)
reader.next()
print(threading.active_count() > 1)
"""


def test_a_process_ends_while_a_prefetch_hangs() -> None:
    paths = {"PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'tests'}"}
    ended = subprocess.run([sys.executable, "-c", HANGING], env=paths, capture_output=True, timeout=60, check=True)
    assert ended.stdout == b"True\n"


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("ahead "):
            thread.join()
