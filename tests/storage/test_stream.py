"""A reader gets every committed row exactly once and in order, or an error that names what is wrong."""

import json
import random
from collections.abc import Callable

import pyarrow as pa
import pytest

from storage import layout
from storage.errors import Fenced, SchemaUnknown, StreamCorrupt
from storage.files import put_file
from storage.log import LogCursor, LogReader, LogWriter
from storage.memory import MemoryStore
from storage.schema import METRIC, SCHEMA_VERSION, SCORE, TRAJECTORY
from storage.store import BytesLike, Store
from storage.stream import Part, StreamReader, StreamWriter, stream_head

MakeTable = Callable[..., pa.Table]

STREAM = layout.trajectories(0)


def read_all(reader: StreamReader) -> list[Part]:
    return list(iter(reader.next, None))


def row_ids(parts: list[Part]) -> list[int]:
    return [row_id for part in parts for row_id in part.table.column("row_id").to_pylist()]


def metrics(values: list[float]) -> pa.Table:
    columns = {
        "t": values,
        "incarnation": [0] * len(values),
        "policy_version": [1] * len(values),
        "name": ["loss"] * len(values),
        "value": values,
    }
    return pa.table({name: pa.array(column, METRIC.field(name).type) for name, column in columns.items()})


def test_every_column_of_every_schema_comes_back_as_written(
    store: Store, make_trajectories: MakeTable, make_scores: MakeTable
) -> None:
    tables = ((make_trajectories(0, 32), TRAJECTORY), (make_scores(7, 32), SCORE), (metrics([1.5, 2.5]), METRIC))
    for number, (table, schema) in enumerate(tables):
        StreamWriter(store, f"s/{number}", schema, "w").write(table, tokens=0)
        part = StreamReader(store, f"s/{number}", schema).next()
        assert part is not None
        assert part.table.equals(table.cast(schema))
        assert part.table.schema.equals(schema, check_metadata=True)


def test_a_slice_of_chunks_comes_back_as_the_rows_it_shows(store: Store, make_trajectories: MakeTable) -> None:
    whole = pa.concat_tables([make_trajectories(0, 5), make_trajectories(5, 5)])
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    writer.write(whole.slice(0, 3), tokens=0)
    writer.write(whole.slice(3, 4), tokens=0)
    first, second = read_all(StreamReader(store, STREAM, TRAJECTORY))
    assert first.table.equals(whole.slice(0, 3))
    assert second.table.equals(whole.slice(3, 4))
    assert second.table.column("row_id").num_chunks == 1


def test_a_part_too_big_to_be_copied_comes_back_whole(store: Store, make_trajectories: MakeTable) -> None:
    table = make_trajectories(0, 8000)
    record = StreamWriter(store, STREAM, TRAJECTORY, "w").write(table, tokens=0)
    assert record.bytes > 1 << 20
    assert [part.table for part in read_all(StreamReader(store, STREAM, TRAJECTORY))] == [table]


def test_the_record_says_what_the_part_holds(store: Store, make_scores: MakeTable) -> None:
    writer = StreamWriter(store, "s", SCORE, "w")
    writer.write(make_scores(0, 4), tokens=9)
    record = writer.write(make_scores(100, 3), tokens=10, min_policy_version=3, max_policy_version=5)
    assert (record.part, record.rows, record.first_row_id, record.tokens) == (1, 3, 100, 10)
    assert (record.min_policy_version, record.max_policy_version, record.schema_version) == (3, 5, SCHEMA_VERSION)
    assert record.bytes == len(store.get(f"s/{record.seg}"))
    assert (writer.epoch, writer.parts, writer.rows) == (0, 2, 7)


def test_rows_without_row_id_are_counted_by_their_place_in_the_stream(store: Store) -> None:
    writer = StreamWriter(store, "s", METRIC, "w")
    assert [writer.write(metrics([0.5] * 3), tokens=0).first_row_id for _ in range(3)] == [0, 3, 6]


class Failing(MemoryStore):
    """Fails, once armed, every write below a folder of this name."""

    fails_in: str | None = None

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        if self.fails_in and f"/{self.fails_in}/" in path:
            raise OSError("the disk is full")
        return super().put_if_absent(path, data)


def test_a_reader_sees_only_committed_parts(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    store = Failing(memory_store.url.removeprefix("memory://"))
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    writer.write(make_trajectories(0), tokens=0)
    store.fails_in = "log"
    with pytest.raises(OSError, match="disk is full"):
        writer.write(make_trajectories(4), tokens=0)
    assert len(store.list(f"{STREAM}/seg")) == 2
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == [0, 1, 2, 3]
    store.fails_in = None
    restarted = StreamWriter(store, STREAM, TRAJECTORY, "w")
    assert restarted.rows == 4
    restarted.write(make_trajectories(4), tokens=0)
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == list(range(8))


def test_a_reader_passes_fences_and_follows_a_restarted_writer(store: Store, make_trajectories: MakeTable) -> None:
    reader = StreamReader(store, STREAM, TRAJECTORY)
    assert reader.next() is None
    for epoch in range(3):
        writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
        assert (writer.epoch, writer.rows) == (epoch, 4 * epoch)
        assert reader.next() is None
        writer.write(make_trajectories(writer.rows), tokens=0)
        part = reader.next()
        assert part is not None
        assert part.record.epoch == epoch


def test_a_zombie_generator_is_fenced_and_its_rows_are_not_seen(store: Store, make_trajectories: MakeTable) -> None:
    zombie = StreamWriter(store, STREAM, TRAJECTORY, "old")
    newer = StreamWriter(store, STREAM, TRAJECTORY, "new")
    with pytest.raises(Fenced):
        zombie.write(make_trajectories(0), tokens=0)
    assert StreamReader(store, STREAM, TRAJECTORY).next() is None
    newer.write(make_trajectories(0, 2), tokens=0)
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == [0, 1]


def test_a_reader_resumed_anywhere_reads_each_row_exactly_once(store: Store, make_trajectories: MakeTable) -> None:
    for rows in (3, 1, 5):
        writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
        writer.write(make_trajectories(writer.rows, rows), tokens=0)
        writer.write(make_trajectories(writer.rows, 2), tokens=0)
    writer.end()
    for before in range(7):
        first = StreamReader(store, STREAM, TRAJECTORY)
        parts = [part for _ in range(before) if (part := first.next())]
        cursor = LogCursor.from_json(json.loads(json.dumps(first.cursor.to_json())))
        assert cursor.rows == len(row_ids(parts))
        resumed = StreamReader(store, STREAM, TRAJECTORY, cursor)
        assert row_ids(parts + read_all(resumed)) == list(range(15))
        assert resumed.ended
        assert StreamReader(store, STREAM, TRAJECTORY, resumed.cursor).ended


def test_ended_is_known_only_after_the_last_part_and_ends_with_a_new_writer(
    store: Store, make_trajectories: MakeTable
) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    writer.write(make_trajectories(0), tokens=0)
    writer.end()
    reader = StreamReader(store, STREAM, TRAJECTORY)
    assert (reader.next() is not None, reader.ended) == (True, False)
    assert (reader.next() is not None, reader.ended) == (False, True)
    StreamWriter(store, STREAM, TRAJECTORY, "w")
    assert (reader.next() is not None, reader.ended) == (False, False)


def test_counting_needs_no_rows(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(memory_store, STREAM, TRAJECTORY, "w")
    for _ in range(3):
        writer.write(make_trajectories(writer.rows), tokens=5, min_policy_version=1, max_policy_version=2)
    memory_store.delete_tree(f"{STREAM}/seg")
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    assert [record.part for record in iter(reader.next_record, None)] == [0, 1, 2]
    assert reader.cursor == stream_head(memory_store, STREAM)
    assert (reader.cursor.part, reader.cursor.rows, reader.cursor.tokens) == (3, 12, 15)
    assert stream_head(memory_store, "streams/nobody-wrote") == LogCursor()


def test_a_live_view_reads_only_what_is_new(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(memory_store, STREAM, TRAJECTORY, "w")
    writer.write(make_trajectories(0), tokens=5)
    view = LogReader(memory_store, STREAM)
    assert view.to_head().rows == 4
    writer.write(make_trajectories(4), tokens=5)
    memory_store.put(f"{STREAM}/{layout.record(0)}", b"damaged, but passed already")
    assert view.to_head().rows == 8


def test_passing_records_and_reading_parts_share_one_cursor(store: Store, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    for _ in range(3):
        writer.write(make_trajectories(writer.rows), tokens=0)
    reader = StreamReader(store, STREAM, TRAJECTORY)
    reader.next_record()
    part = reader.next()
    assert part is not None
    assert (part.record.part, row_ids([part])) == (1, [4, 5, 6, 7])


@pytest.mark.parametrize(("first_row_id", "rows"), [(1, 4), (4, 4), (0, 0)])
def test_trajectories_that_do_not_continue_the_stream_are_refused(
    store: Store, make_trajectories: MakeTable, first_row_id: int, rows: int
) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    with pytest.raises(ValueError, match=r"the first row_id is \d, expected 0|at least one row"):
        writer.write(make_trajectories(first_row_id, rows), tokens=0)
    assert stream_head(store, STREAM).part == 0


def test_an_invalid_table_leaves_nothing_behind(store: Store, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    with pytest.raises(ValueError, match="columns are"):
        writer.write(make_trajectories().drop_columns("seed"), tokens=0)
    assert store.list(f"{STREAM}/seg") == []
    assert writer.write(make_trajectories(), tokens=0).part == 0


def test_any_flipped_bit_of_a_segment_is_found_before_it_is_parsed(
    memory_store: MemoryStore, make_trajectories: MakeTable
) -> None:
    record = StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(0, 16), tokens=0)
    segment = f"{STREAM}/{record.seg}"
    good = bytes(memory_store.get(segment))
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    chooser = random.Random(0)
    for position in chooser.sample(range(len(good)), 400):
        bad = bytearray(good)
        bad[position] ^= 1 << chooser.randrange(8)
        memory_store.put(segment, bad)
        with pytest.raises(StreamCorrupt, match=r"\(named by record 1\): the file's checksum is"):
            reader.next()
    memory_store.put(segment, good)
    assert row_ids(read_all(reader)) == list(range(16))


@pytest.mark.parametrize("kept", [0, 1, -1])
def test_a_truncated_segment_is_named(memory_store: MemoryStore, make_trajectories: MakeTable, kept: int) -> None:
    record = StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(), tokens=0)
    segment = f"{STREAM}/{record.seg}"
    memory_store.put(segment, memory_store.get(segment)[:kept])
    with pytest.raises(StreamCorrupt, match=rf"{segment} \(named by record 1\): the file has \d+ bytes, expected"):
        StreamReader(memory_store, STREAM, TRAJECTORY).next()


def test_a_missing_segment_is_named(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(), tokens=0)
    memory_store.delete_tree(f"{STREAM}/seg")
    with pytest.raises(StreamCorrupt, match="the file is missing"):
        StreamReader(memory_store, STREAM, TRAJECTORY).next()


def test_a_stream_of_another_schema_is_refused(store: Store, make_scores: MakeTable) -> None:
    StreamWriter(store, "s", SCORE, "w").write(make_scores(), tokens=0)
    with pytest.raises(StreamCorrupt, match=r"seg/.* \(named by record 1\): columns are"):
        StreamReader(store, "s", TRAJECTORY).next()


def commit_file(store: Store, data: bytes, **fields: int) -> None:
    """Commit `data` as a part of stream `s`, as a writer that checks nothing would."""
    file = put_file(store, "s/seg/x", data)
    values = {"rows": 1, "first_row_id": 0, "tokens": 0, "schema_version": SCHEMA_VERSION} | fields
    LogWriter(store, "s", "w").commit("data", seg="seg/x", bytes=file.bytes, checksum=file.checksum, **values)


def test_a_segment_that_is_no_arrow_stream_is_named(store: Store) -> None:
    commit_file(store, b"no Arrow stream")
    with pytest.raises(StreamCorrupt, match="s/seg/x"):
        StreamReader(store, "s", SCORE).next()


def test_a_segment_with_other_rows_than_its_record_says_is_named(store: Store, make_scores: MakeTable) -> None:
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, SCORE) as writer:
        writer.write_table(make_scores(0, 2))
    commit_file(store, sink.getvalue().to_pybytes(), rows=3)
    with pytest.raises(StreamCorrupt, match="the file has 2 rows, expected 3"):
        StreamReader(store, "s", SCORE).next()


def test_a_part_of_a_newer_schema_version_is_refused_unread(store: Store) -> None:
    commit_file(store, b"in a format of the future", schema_version=SCHEMA_VERSION + 1)
    with pytest.raises(SchemaUnknown, match="schema version 2, but this Millrace knows 1"):
        StreamReader(store, "s", SCORE).next()


class LostReplies(MemoryStore):
    """Stores, but every reply is lost and the repeated request finds the object there."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        super().put_if_absent(path, data)
        return False


def test_parts_whose_replies_were_lost_are_committed_once(
    memory_store: MemoryStore, make_trajectories: MakeTable
) -> None:
    store = LostReplies(memory_store.url.removeprefix("memory://"))
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    for _ in range(3):
        writer.write(make_trajectories(writer.rows), tokens=0)
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == list(range(12))


class Losing(MemoryStore):
    """Says every object is there already, and keeps something else under its name."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        return super().put_if_absent(path, data if "/log/" in path else b"something else") and "/log/" in path


def test_a_segment_whose_name_holds_other_bytes_is_not_committed(
    memory_store: MemoryStore, make_trajectories: MakeTable
) -> None:
    store = Losing(memory_store.url.removeprefix("memory://"))
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    with pytest.raises(StreamCorrupt, match="the file has 14 bytes"):
        writer.write(make_trajectories(), tokens=0)
    assert stream_head(store, STREAM).part == 0
