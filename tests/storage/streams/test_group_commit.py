"""Group commit: appends become parts bounded by rows, bytes and time, whole and in order."""

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.stores.dict_store import DictStore
from support.streams.numbered import PATH, numbered, open_reader, take_numbers

from storage.schema import METRIC
from storage.stores.base import BytesLike
from storage.streams.group_commit import GroupCommit
from storage.streams.record import Record
from storage.streams.stream import StreamWriter

FOREVER = 1e6


class GatedStore(DictStore):
    """Says when a part was committed, and fails to write while `broken`."""

    def __init__(self) -> None:
        super().__init__()
        self.committed = threading.Semaphore(0)
        self.writes_met_the_fault = threading.Semaphore(0)
        self.threads: list[threading.Thread] = []
        self.broken = False

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        if self.broken:
            self.writes_met_the_fault.release()
            raise OSError("the disk is gone")
        created = super().put_if_absent(path, data)
        if "/log/" in path:
            self.threads.append(threading.current_thread())
            self.committed.release()
        return created


@pytest.fixture
def gated() -> GatedStore:
    return GatedStore()


@pytest.fixture
def stream(gated: GatedStore) -> StreamWriter:
    writer = StreamWriter(gated, PATH, METRIC, "w")
    gated.committed.acquire()
    return writer


def append(commits: GroupCommit, rows: int, **fields: int) -> None:
    commits.append(numbered(commits.rows, rows), **{"tokens": rows} | fields)


def records(store: DictStore) -> list[Record]:
    return list(iter(open_reader(store).next_record, None))


def test_flush_commits_appends_below_every_bound(gated: GatedStore, stream: StreamWriter) -> None:
    with GroupCommit(stream, max_rows=100, max_bytes=1 << 20, max_seconds=FOREVER) as commits:
        for _ in range(3):
            append(commits, 2)
        assert (commits.rows, stream.rows, len(records(gated))) == (6, 0, 0)
        commits.flush()
        assert (commits.rows, stream.rows) == (6, 6)
        commits.flush()
        append(commits, 1)
    assert [record.rows for record in records(gated)] == [6, 1]
    assert take_numbers(open_reader(gated)) == list(range(7))


def test_a_part_is_committed_at_its_number_of_rows(gated: GatedStore, stream: StreamWriter) -> None:
    with GroupCommit(stream, max_rows=4, max_bytes=1 << 20, max_seconds=FOREVER) as commits:
        append(commits, 2)
        assert stream.rows == 0
        append(commits, 2)
        assert stream.rows == 4
        append(commits, 3)
        append(commits, 3)
        assert stream.rows == 7
        append(commits, 9)
        assert stream.rows == 19
    assert [record.rows for record in records(gated)] == [4, 3, 3, 9]


def test_a_part_ends_at_its_bytes_or_its_incarnation(gated: GatedStore, stream: StreamWriter) -> None:
    size = numbered(0, 10).nbytes
    with GroupCommit(stream, max_rows=1000, max_bytes=2 * size, max_seconds=FOREVER) as commits:
        for expected in (0, 20, 20, 40):
            append(commits, 10)
            assert stream.rows == expected
        append(commits, 1, incarnation=0)
        append(commits, 2, incarnation=1)
    assert [record.rows for record in records(gated)] == [20, 20, 1, 2]


def test_a_part_is_committed_by_a_thread_after_its_time(gated: GatedStore, stream: StreamWriter) -> None:
    with GroupCommit(stream, max_rows=1000, max_bytes=1 << 20, max_seconds=0.01) as commits:
        for part in range(3):
            append(commits, part + 1)
            assert gated.committed.acquire(timeout=60)
            assert len(records(gated)) == part + 1
        assert threading.current_thread() not in gated.threads[1:]
    assert take_numbers(open_reader(gated)) == list(range(6))


def test_without_a_wait_the_caller_commits_each_append(gated: GatedStore, stream: StreamWriter) -> None:
    threads = threading.active_count()
    with GroupCommit(stream, max_rows=1000, max_bytes=1 << 20, max_seconds=0) as commits:
        assert threading.active_count() == threads
        for rows in (1, 3, 2):
            append(commits, rows)
            assert stream.rows == commits.rows
    assert [record.rows for record in records(gated)] == [1, 3, 2]
    assert set(gated.threads) == {threading.current_thread()}


def test_the_record_sums_up_the_appends_of_its_part(gated: GatedStore, stream: StreamWriter) -> None:
    with GroupCommit(stream, max_rows=100, max_bytes=1 << 20, max_seconds=FOREVER) as commits:
        append(commits, 2, tokens=5, min_policy_version=3, max_policy_version=4, incarnation=1, last_group_id=7)
        append(commits, 1, tokens=6, incarnation=1, last_group_id=8)
        append(commits, 1, tokens=7, min_policy_version=2, max_policy_version=3, incarnation=1, last_group_id=9)
    (record,) = records(gated)
    assert (record.rows, record.tokens, record.min_policy_version, record.max_policy_version) == (4, 18, 2, 4)
    assert (record.incarnation, record.last_group_id) == (1, 9)


@pytest.mark.parametrize("then", ["append", "flush", "close"])
def test_an_error_of_the_thread_is_raised_by_the_next_call(gated: GatedStore, stream: StreamWriter, then: str) -> None:
    commits = GroupCommit(stream, max_rows=100, max_bytes=1 << 20, max_seconds=0.01)
    gated.broken = True
    append(commits, 1)
    assert gated.writes_met_the_fault.acquire(timeout=60)
    gated.broken = False
    for _ in range(2):
        with pytest.raises(OSError):
            append(commits, 1) if then == "append" else getattr(commits, then)()
        if then == "close":
            break
    assert records(gated) == []


def test_leaving_by_an_error_commits_nothing_more(gated: GatedStore, stream: StreamWriter) -> None:
    threads = threading.active_count()
    with (
        pytest.raises(KeyError),
        GroupCommit(stream, max_rows=100, max_bytes=1 << 20, max_seconds=FOREVER) as commits,
    ):
        append(commits, 1)
        raise KeyError("the caller's own")
    assert threading.active_count() == threads
    assert records(gated) == []
    with pytest.raises(ValueError):
        append(commits, 1)


@given(
    rows=st.lists(st.integers(1, 7), max_size=25),
    max_rows=st.integers(1, 12),
    max_bytes=st.integers(1, 600),
    flushes=st.sets(st.integers(0, 25)),
)
def test_each_append_is_committed_once_whole_and_in_order(
    rows: list[int], max_rows: int, max_bytes: int, flushes: set[int]
) -> None:
    store = DictStore()
    stream = StreamWriter(store, PATH, METRIC, "w")
    starts = {sum(rows[:index]) for index in range(len(rows))}
    with GroupCommit(stream, max_rows=max_rows, max_bytes=max_bytes, max_seconds=FOREVER) as commits:
        for index, number in enumerate(rows):
            append(commits, number)
            if index in flushes:
                commits.flush()
    committed = records(store)
    assert take_numbers(open_reader(store)) == list(range(sum(rows)))
    assert {record.first_row_id for record in committed} <= starts
    for record in committed:
        is_one_append = record.first_row_id + record.rows in {*starts, sum(rows)} and not any(
            record.first_row_id < start < record.first_row_id + record.rows for start in starts
        )
        assert record.rows <= max_rows or is_one_append
