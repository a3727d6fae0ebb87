"""Streams over a store that fails: nothing is lost, nothing is there twice, and the order stays."""

import random
import threading
import time
from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore
from support.streams.numbered import PATH, numbered, open_reader, take_numbers
from support.streams.stubborn import StubbornReader, StubbornWriter, insist

from storage import layout
from storage.errors import Fenced, StreamCorrupt
from storage.schema import METRIC
from storage.stores.base import Store
from storage.stores.local import LocalStore
from storage.streams.group_commit import GroupCommit
from storage.streams.log import LogReader
from storage.streams.record import Record
from storage.streams.stream import StreamWriter, stream_head

SEEDS = (0,)
STORM_SEEDS = range(1, 10)
PARTS = 50
ROWS = 160
COMMITS = 152
DROPPED = 27
RATES = {
    "latency": 0.2,
    "error_before": 0.05,
    "error_after": 0.15,
    "lost_reply": 0.15,
    "stale_read": 0.5,
    "bit_flip": 0.1,
}
"""Faults that a store may have without breaking its promises, and rates at which a log can be read to its head."""


def open_writer(store: Store, name: str = "w") -> StreamWriter:
    return StreamWriter(store, PATH, METRIC, name)


def read_records(store: Store) -> list[Record]:
    return list(iter(LogReader(store, PATH).next, None))


@pytest.fixture(params=["near", "far"])
def inner(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """A store on this machine, and one that its readers read ahead in."""
    return LocalStore(tmp_path / "store", fsync=False) if request.param == "near" else DictStore()


def write_and_read(inner: Store, seed: int, faults: Mapping[str, float]) -> tuple[Counter[str], StubbornWriter]:
    """Writes PARTS parts of 1 to 4 rows and follows them, both through faults; each row must arrive once, in order.

    Returns how often the faults fired, and the writer.
    """
    for_writer, for_reader = FaultyStore(inner, seed, **faults), FaultyStore(inner, seed + 1000, **faults)
    chooser = random.Random(seed)
    reader = StubbornReader(for_reader)
    writer = StubbornWriter(for_writer)
    expected = 0
    for _ in range(PARTS):
        rows = chooser.randint(1, 4)
        writer.write(rows)
        expected += rows
        if chooser.random() < 0.7:
            reader.take()
    while len(reader.numbers) < expected:
        reader.take()
    assert reader.numbers == list(range(expected)), f"seed {seed}"
    assert take_numbers(open_reader(inner)) == reader.numbers, f"seed {seed}"
    return for_writer.fired + for_reader.fired, writer


@pytest.mark.parametrize("fault", RATES)
def test_under_each_fault_every_row_arrives_once_and_in_order(fault: str, inner: Store, seed: int) -> None:
    fired, writer = write_and_read(inner, seed, {fault: RATES[fault]})
    assert set(fired) == {fault}, f"seed {seed}: {fired}"
    fences = [record for record in read_records(inner) if record.kind == "fence"]
    assert len(fences) <= writer.opened
    if fault in ("latency", "lost_reply", "stale_read"):
        assert writer.opened == len(fences) == 1, f"seed {seed}: a healthy writer gave up"


def test_under_all_of_them_at_once_every_row_arrives_once_and_in_order(inner: Store, seed: int) -> None:
    fired, _ = write_and_read(inner, seed, {fault: rate / 2 for fault, rate in RATES.items()})
    assert set(fired) == set(RATES), f"seed {seed}: {fired}"


@pytest.mark.parametrize("max_seconds", [0.0, 0.001])
def test_grouped_rows_arrive_once_if_the_caller_continues_after_the_committed_ones(
    inner: Store, seed: int, max_seconds: float
) -> None:
    """The caller meets the errors with 0 seconds; otherwise the timer's thread meets most of them."""
    store = FaultyStore(inner, seed, **{fault: rate / 4 for fault, rate in RATES.items()})
    while (stream := insist(lambda: open_writer(store))).rows < ROWS:
        try:
            with GroupCommit(stream, max_rows=7, max_bytes=1 << 20, max_seconds=max_seconds) as group:
                while group.rows < ROWS:
                    group.append(numbered(group.rows, 2), tokens=2)
                    # Long enough for a part to be committed by the thread, now and then.
                    time.sleep(max_seconds / 2)
        except (OSError, StreamCorrupt):
            continue
    assert len(store.fired) >= 3, f"seed {seed}: {store.fired}"
    assert take_numbers(open_reader(inner)) == list(range(ROWS)), f"seed {seed}"


def test_27_of_152_replies_dropped_make_no_false_fence_and_no_duplicate(seed: int) -> None:
    # The fence is the log's first create; the replies of data records and of part files are drawn apart.
    records = frozenset(1 + call for call in random.Random(f"{seed} records").sample(range(COMMITS), DROPPED))
    inner = DictStore()
    lossy_records = FaultyStore(inner, seed, lost_reply=Fault(calls=records, paths=f"{PATH}/log/*"))
    part_files = frozenset(random.Random(f"{seed} segments").sample(range(COMMITS), DROPPED))
    store = FaultyStore(lossy_records, seed, lost_reply=Fault(calls=part_files, paths=f"{PATH}/seg/*"))
    writer = open_writer(store)
    reader = open_reader(inner)
    numbers = []
    for commit in range(COMMITS):
        writer.write(numbered(commit, 1), tokens=1)
        numbers += take_numbers(reader)
    assert (lossy_records.fired["lost_reply"], store.fired["lost_reply"]) == (DROPPED, DROPPED)
    assert numbers == list(range(COMMITS)), f"seed {seed}"
    committed = read_records(inner)
    assert (writer.epoch, {record.epoch for record in committed}) == (0, {0}), f"seed {seed}"
    assert [record.kind for record in committed] == ["fence"] + ["data"] * COMMITS
    assert len(inner.list(f"{PATH}/seg")) == COMMITS


@pytest.mark.parametrize("fault", ["error_before", "error_after"])
@pytest.mark.parametrize("place", ["log/000000000003.json", "seg/*"])
def test_a_writer_reopened_after_an_error_learns_whether_it_had_committed(fault: str, place: str, seed: int) -> None:
    """A caller that continues from `.rows` loses nothing and repeats nothing, whether the put happened or not."""
    inner = DictStore()
    open_writer(inner).write(numbered(0, 2), tokens=2)
    # Opening looks whether there are records behind the end of the log: the first call that names record 3.
    looks = 1 if fault == "error_before" and place.startswith("log/") else 0
    store = FaultyStore(inner, seed, **{fault: Fault(calls=frozenset({looks}), paths=f"{PATH}/{place}")})
    writer = open_writer(store)
    with pytest.raises(OSError):
        writer.write(numbered(2, 3), tokens=3)
    assert store.fired[fault] == 1
    afresh = open_writer(store)
    committed = fault == "error_after" and place.startswith("log/")
    assert afresh.rows == (5 if committed else 2), f"seed {seed}"
    afresh.write(numbered(afresh.rows, 4), tokens=4)
    assert take_numbers(open_reader(inner)) == list(range(afresh.rows)), f"seed {seed}"
    assert store.fired[fault] == 1


@pytest.mark.parametrize("faults", [(), ("lost_reply",), ("error_after", "error_before", "lost_reply")])
def test_of_two_writers_the_older_is_fenced_and_commits_nothing_after(faults: tuple[str, ...], seed: int) -> None:
    inner = DictStore()
    old_store, new_store = (
        FaultyStore(inner, seed + k, **{fault: RATES[fault] for fault in faults}) for k in (0, 1000)
    )
    old = StubbornWriter(old_store)
    for _ in range(20):
        old.write(2)
    new = StubbornWriter(new_store)
    assert new.writer.rows == 40
    before = len(read_records(inner))
    for _ in range(3):
        with pytest.raises(Fenced):
            insist(lambda: old.writer.write(numbered(old.writer.rows, 1, "zombie"), tokens=1))
    assert len(read_records(inner)) == before, f"seed {seed}"
    for _ in range(20):
        new.write(2)
    with pytest.raises(Fenced):
        insist(lambda: old.writer.write(numbered(old.writer.rows, 1, "zombie"), tokens=1))
    assert take_numbers(open_reader(inner)) == list(range(80)), f"seed {seed}"
    assert all((old_store.fired + new_store.fired)[fault] for fault in faults), f"seed {seed}: a fault never fired"


def test_of_writers_that_fight_for_a_stream_each_record_has_one_winner(seed: int) -> None:
    """Two threads that take the stream from each other whenever they are fenced, over late and lost replies."""
    inner = DictStore()
    committed: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    takeovers = 0
    start = threading.Barrier(2, timeout=60)

    def fight(name: str, seed: int) -> None:
        nonlocal takeovers
        store = FaultyStore(inner, seed, latency=0.3, lost_reply=0.2)
        writer = open_writer(store, name)
        for number in range(40):
            if number % 10 == 0:
                # Both have a writer, so one of them has the older.
                start.wait()
            while True:
                try:
                    record = writer.write(numbered(number, 1, name), tokens=1)
                    break
                except Fenced:
                    takeovers += 1
                    writer = open_writer(store, name)
            committed[name].append((record.seq, number))

    with ThreadPoolExecutor(2) as threads:
        for ended in [threads.submit(fight, name, seed + k) for k, name in enumerate("ab")]:
            ended.result()
    assert takeovers >= 4, f"seed {seed}: they never met"
    stored: dict[str, list[tuple[int, int]]] = {"a": [], "b": []}
    for part in iter(open_reader(inner).next, None):
        (row,) = part.table.to_pylist()
        stored[row["name"]].append((part.record.seq, row["policy_version"]))
    assert stored == committed, f"seed {seed}"
    assert [number for _, number in stored["a"]] == [number for _, number in stored["b"]] == list(range(40))


def test_a_torn_record_is_named_and_nothing_is_built_on_it(seed: int) -> None:
    inner = DictStore()
    writer = open_writer(FaultyStore(inner, seed, torn_put=Fault(calls=frozenset({4}), paths=f"{PATH}/log/*")))
    for part in range(3):
        writer.write(numbered(part, 1), tokens=1)
    with pytest.raises(OSError):
        writer.write(numbered(3, 1), tokens=1)
    torn = f"{PATH}/log/000000000004.json"
    assert torn in inner.objects
    assert read_until_missing(inner) == ([0, 1, 2], torn), f"seed {seed}"
    for touch in (lambda: open_writer(inner), lambda: writer.write(numbered(3, 1), tokens=1)):
        with pytest.raises(StreamCorrupt) as raised:
            touch()
        assert raised.value.file == torn, f"seed {seed}"


def test_a_torn_part_file_is_never_part_of_the_stream(seed: int) -> None:
    inner = DictStore()
    store = FaultyStore(inner, seed, torn_put=Fault(rate=0.3, paths=f"{PATH}/seg/*"))
    writer = StubbornWriter(store)
    for _ in range(PARTS):
        writer.write(1)
    assert store.fired["torn_put"] >= 5, f"seed {seed}"
    assert take_numbers(open_reader(inner)) == list(range(PARTS)), f"seed {seed}"
    assert len(inner.list(f"{PATH}/seg")) == PARTS + store.fired["torn_put"]


@pytest.mark.parametrize("lost_from", ["log", "seg", "*"])
def test_a_power_cut_on_a_disk_that_lied_leaves_a_beginning_or_is_named(lost_from: str, seed: int) -> None:
    inner = DictStore()
    surely = frozenset({random.Random(seed).randrange(PARTS)})
    store = FaultyStore(inner, seed, dropped_fsync=Fault(rate=0.05, calls=surely, paths=f"{PATH}/{lost_from}/*"))
    writer = open_writer(store)
    for part in range(PARTS):
        writer.write(numbered(part, 1), tokens=1)
    lost = store.crash()
    assert lost, f"seed {seed}: nothing was lost"
    numbers, missing = read_until_missing(inner)
    assert numbers == list(range(len(numbers))), f"seed {seed}"
    assert missing in lost, f"seed {seed}: lost {lost}"
    try:
        afresh = open_writer(inner)
        for _ in range(3):
            afresh.write(numbered(afresh.rows, 1), tokens=1)
    except StreamCorrupt as error:
        assert "epoch 0 already committed" in str(error) or "missing" in str(error), f"seed {seed}: {error}"
    after, _ = read_until_missing(inner)
    assert after == list(range(len(after))), f"seed {seed}"
    assert len(after) >= len(numbers)


def test_a_snapshot_that_outlived_the_records_it_stands_on_misleads_nobody(seed: int) -> None:
    inner = DictStore()
    head = f"{PATH}/{layout.HEAD}"
    kept = random.Random(seed).randrange(2, 60)
    tail = Fault(calls=frozenset(range(kept, COMMITS + 1)), paths=f"{PATH}/log/*")
    store = FaultyStore(inner, seed, dropped_fsync=tail)
    writer = open_writer(store)
    for row in range(COMMITS):
        writer.write(numbered(row, 1), tokens=1)
    outlived = inner.objects[head]
    assert len(store.crash()) == COMMITS + 1 - kept
    # First the log is too short for the snapshot; the second time other records lie where it stands.
    for expected in (kept - 1, kept - 1 + COMMITS):
        inner.objects[head] = outlived
        assert stream_head(inner, PATH).rows == expected, f"seed {seed}"
        afresh = open_writer(inner)
        assert afresh.rows == expected, f"seed {seed}"
        for _ in range(COMMITS):
            afresh.write(numbered(afresh.rows, 1), tokens=1)
        assert take_numbers(open_reader(inner)) == list(range(expected + COMMITS)), f"seed {seed}"


def read_until_missing(store: Store) -> tuple[list[int], str]:
    """The numbers up to the first damage or the end, and the file that is named as damaged or would come next."""
    reader = open_reader(store)
    numbers: list[int] = []
    try:
        for part in iter(reader.next, None):
            numbers += part.table["policy_version"].to_pylist()
    except StreamCorrupt as error:
        return numbers, error.file
    return numbers, f"{PATH}/{layout.record(reader.cursor.seq)}"
