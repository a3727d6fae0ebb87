"""A reader returns each committed row once and in order, or an error that names the damaged file."""

import io
import itertools
import json
import random
from collections.abc import Callable

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore

from storage import layout
from storage.errors import PartCorrupt, PartRemoved, SchemaUnknown, StreamCorrupt
from storage.schema import METRIC, SCHEMA_VERSION, SCORE, TRAJECTORY
from storage.stores.base import BytesLike, Store
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore
from storage.streams.files import put_file
from storage.streams.log import LogCursor, LogWriter
from storage.streams.sealed import seal
from storage.streams.stream import (
    Part,
    StreamReader,
    StreamWriter,
    UnreadablePart,
    read_part,
    read_removed,
    stream_head,
    write_removed,
)

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


def test_a_record_describes_its_part(store: Store, make_scores: MakeTable) -> None:
    writer = StreamWriter(store, "s", SCORE, "w")
    writer.write(make_scores(0, 4), tokens=9)
    record = writer.write(
        make_scores(100, 3), tokens=10, min_policy_version=3, max_policy_version=5, incarnation=2, last_group_id=7
    )
    assert (record.incarnation, record.last_group_id, record.group_size, record.vocab_size) == (2, 7, 0, 0)
    assert (record.part, record.rows, record.first_row_id, record.tokens) == (1, 3, 100, 10)
    assert (record.min_policy_version, record.max_policy_version, record.schema_version) == (3, 5, SCHEMA_VERSION)
    assert record.bytes == len(store.get(f"s/{record.file}"))
    assert (writer.epoch, writer.parts, writer.rows) == (0, 2, 7)


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
    with pytest.raises(OSError):
        writer.write(make_trajectories(4), tokens=0)
    assert len(store.list(f"{STREAM}/seg")) == 2
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == [0, 1, 2, 3]
    store.fails_in = None
    restarted = StreamWriter(store, STREAM, TRAJECTORY, "w")
    assert restarted.rows == 4
    restarted.write(make_trajectories(4), tokens=0)
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == list(range(8))


def test_a_reader_resumed_anywhere_reads_each_row_exactly_once(store: Store, make_trajectories: MakeTable) -> None:
    for rows in (3, 1, 5):
        writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
        writer.write(make_trajectories(writer.rows, rows), tokens=0)
        writer.write(make_trajectories(writer.rows, 2), tokens=0)
    writer.end()
    for num_read in range(7):
        first = StreamReader(store, STREAM, TRAJECTORY)
        parts = [part for _ in range(num_read) if (part := first.next())]
        cursor = LogCursor.from_json(json.loads(json.dumps(first.cursor.to_json())))
        assert cursor.rows == len(row_ids(parts))
        resumed = StreamReader(store, STREAM, TRAJECTORY, cursor)
        assert row_ids(parts + read_all(resumed)) == list(range(15))
        assert resumed.ended
        assert StreamReader(store, STREAM, TRAJECTORY, resumed.cursor).ended


def test_a_stream_ends_after_its_last_part_until_a_new_writer_opens(store: Store, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    writer.write(make_trajectories(0), tokens=0)
    writer.end()
    reader = StreamReader(store, STREAM, TRAJECTORY)
    assert (reader.next() is not None, reader.ended) == (True, False)
    assert (reader.next() is not None, reader.ended) == (False, True)
    StreamWriter(store, STREAM, TRAJECTORY, "w")
    assert (reader.next() is not None, reader.ended) == (False, False)


def test_rows_are_counted_without_reading_parts(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(memory_store, STREAM, TRAJECTORY, "w")
    for _ in range(3):
        writer.write(make_trajectories(writer.rows), tokens=5, min_policy_version=1, max_policy_version=2)
    memory_store.delete_tree(f"{STREAM}/seg")
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    assert [record.part for record in iter(reader.next_record, None)] == [0, 1, 2]
    assert reader.cursor == stream_head(memory_store, STREAM)
    assert (reader.cursor.part, reader.cursor.rows, reader.cursor.tokens) == (3, 12, 15)
    assert stream_head(memory_store, "streams/nobody-wrote") == LogCursor()


@pytest.mark.parametrize(("first_row_id", "rows"), [(1, 4), (4, 4), (0, 0)])
def test_rows_that_do_not_continue_the_stream_are_refused(
    store: Store, make_trajectories: MakeTable, first_row_id: int, rows: int
) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w")
    with pytest.raises(ValueError):
        writer.write(make_trajectories(first_row_id, rows), tokens=0)
    assert store.list(f"{STREAM}/seg") == []
    assert writer.write(make_trajectories(), tokens=0).part == 0


def test_rows_that_break_their_writers_promise_are_refused(store: Store, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(store, STREAM, TRAJECTORY, "w", vocab_size=50, group_size=4)
    record = writer.write(make_trajectories(0, 8), tokens=0)
    assert (record.vocab_size, record.group_size) == (50, 4)
    with pytest.raises(ValueError, match=r"^row 0: "):
        writer.write(make_trajectories(8, 3), tokens=0)
    narrow = StreamWriter(store, STREAM, TRAJECTORY, "w", vocab_size=10)
    with pytest.raises(ValueError, match="token id"):
        narrow.write(make_trajectories(8, 4), tokens=0)
    assert row_ids(read_all(StreamReader(store, STREAM, TRAJECTORY))) == list(range(8))


COLUMNS = ["group_id", "row_id", "rollout_logprobs"]


def test_chosen_columns_are_read_in_the_order_of_the_schema(store: Store, make_trajectories: MakeTable) -> None:
    table = make_trajectories(0, 8)
    record = StreamWriter(store, STREAM, TRAJECTORY, "w").write(table, tokens=0)
    part = StreamReader(store, STREAM, TRAJECTORY, columns=COLUMNS).next()
    assert part is not None
    assert part.table.column_names == ["row_id", "group_id", "rollout_logprobs"]
    assert part.table.equals(table.select(part.table.column_names))
    assert read_part(store, STREAM, TRAJECTORY, record, columns=COLUMNS).equals(part.table)
    assert read_part(store, STREAM, TRAJECTORY, record, columns=[]).num_columns == 0
    with pytest.raises(ValueError, match="reward"):
        StreamReader(store, STREAM, TRAJECTORY, columns=["row_id", "reward"])


def test_a_read_of_few_columns_verifies_the_whole_file(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    record = StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(0, 8), tokens=0)
    good = bytes(memory_store.get(f"{STREAM}/{record.file}"))
    at = good.index(b'{"answer": "7"}')
    memory_store.put(f"{STREAM}/{record.file}", good[:at] + b"[" + good[at + 1 :])
    with pytest.raises(PartCorrupt):
        StreamReader(memory_store, STREAM, TRAJECTORY, columns=["row_id"]).next()


class Remembering(LocalStore):
    """Keeps the last buffer it returned."""

    def get(self, path: str, start: int = 0, length: int | None = None) -> memoryview:
        self.returned = super().get(path, start, length)
        return self.returned


def test_columns_of_a_local_part_are_views_of_the_mapped_file(tmp_path: object, make_trajectories: MakeTable) -> None:
    store = Remembering(str(tmp_path))
    record = StreamWriter(store, STREAM, TRAJECTORY, "w").write(make_trajectories(0, 8000), tokens=0)
    assert record.bytes > 1 << 20
    part = StreamReader(store, STREAM, TRAJECTORY).next()
    assert part is not None
    start = np.frombuffer(store.returned, np.uint8).ctypes.data
    buffers = [b for column in part.table.columns for chunk in column.chunks for b in chunk.buffers() if b]
    assert len(buffers) >= len(TRAJECTORY)
    for buffer in buffers:
        assert start <= buffer.address
        assert buffer.address + buffer.size <= start + record.bytes


def test_any_flipped_bit_of_a_part_file_is_detected(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    record = StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(0, 16), tokens=0)
    part_file = f"{STREAM}/{record.file}"
    good = bytes(memory_store.get(part_file))
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    chooser = random.Random(0)
    for position in chooser.sample(range(len(good)), 200):
        bad = bytearray(good)
        bad[position] ^= 1 << chooser.randrange(8)
        memory_store.put(part_file, bad)
        with pytest.raises(PartCorrupt) as caught:
            reader.next()
        assert (caught.value.file, caught.value.record) == (part_file, 1)
    memory_store.put(part_file, good)
    assert row_ids(read_all(reader)) == list(range(16))


@pytest.mark.parametrize("kept", [0, 1, -1, None])
def test_a_truncated_or_missing_part_file_is_named(
    memory_store: MemoryStore, make_trajectories: MakeTable, kept: int | None
) -> None:
    record = StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(), tokens=0)
    part_file = f"{STREAM}/{record.file}"
    data = memory_store.get(part_file)
    memory_store.delete(part_file)
    if kept is not None:
        memory_store.put(part_file, data[:kept])
    with pytest.raises(PartCorrupt) as caught:
        StreamReader(memory_store, STREAM, TRAJECTORY).next()
    assert (caught.value.file, caught.value.record) == (part_file, 1)


def test_a_damaged_part_can_be_passed_by_its_record(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(memory_store, STREAM, TRAJECTORY, "w")
    records = [writer.write(make_trajectories(writer.rows), tokens=5) for _ in range(3)]
    memory_store.put(f"{STREAM}/{records[1].file}", b"damaged")
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    assert reader.next() is not None
    for _ in range(2):
        with pytest.raises(PartCorrupt) as caught:
            reader.next()
        assert (caught.value.file, caught.value.record) == (f"{STREAM}/{records[1].file}", 2)
    assert reader.next_record() == records[1]
    assert row_ids(read_all(reader)) == [8, 9, 10, 11]
    assert reader.cursor.tokens == 15


def test_unreadable_parts_are_passed_in_their_place(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    writer = StreamWriter(memory_store, STREAM, TRAJECTORY, "w")
    records = [writer.write(make_trajectories(writer.rows), tokens=0) for _ in range(4)]
    for record in (records[0], records[2]):
        memory_store.delete(f"{STREAM}/{record.file}")
    write_removed(memory_store, STREAM, parts=1, why="age")
    passed = list(StreamReader(memory_store, STREAM, TRAJECTORY).each())
    assert [part.record for part in passed] == records
    errors = [type(part.error) if isinstance(part, UnreadablePart) else None for part in passed]
    assert errors == [PartRemoved, None, PartCorrupt, None]
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    assert row_ids(list(reader.readable())) == row_ids([part for part in passed if isinstance(part, Part)])
    writer.write(make_trajectories(writer.rows), tokens=0)
    assert [part.record.part for part in reader.readable()] == [4]


def test_a_damaged_record_is_not_a_damaged_part(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    StreamWriter(memory_store, STREAM, TRAJECTORY, "w").write(make_trajectories(), tokens=5)
    name = f"{STREAM}/{layout.record(1)}"
    memory_store.put(name, bytes(memory_store.get(name)).replace(b'"tokens": 5', b'"tokens": 7'))
    reader = StreamReader(memory_store, STREAM, TRAJECTORY)
    for look in (reader.next, reader.next_record):
        with pytest.raises(StreamCorrupt) as caught:
            look()
        assert not isinstance(caught.value, PartCorrupt)
        assert caught.value.file == name


@pytest.mark.parametrize("data", [b"", b"[]", b'{"parts": 2}', seal({"parts": "2"}), seal({"parts": True}), b"\xff"])
def test_an_invalid_record_of_removed_parts_is_named(memory_store: MemoryStore, data: bytes) -> None:
    memory_store.put(f"s/{layout.REMOVED}", data)
    with pytest.raises(StreamCorrupt) as caught:
        read_removed(memory_store, "s")
    assert caught.value.file == f"s/{layout.REMOVED}"


def test_any_flipped_bit_of_the_record_of_removed_parts_is_named() -> None:
    store = DictStore()
    write_removed(store, "s", parts=2, why="age")
    file = f"s/{layout.REMOVED}"
    good = store.objects[file]
    for position, bit in itertools.product(range(len(good)), range(8)):
        store.objects[file] = good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :]
        with pytest.raises(StreamCorrupt) as caught:
            read_removed(store, "s")
        assert caught.value.file == file, (position, bit)
    store.objects[file] = good
    assert read_removed(store, "s") == 2


def commit_file(store: Store, data: bytes, **fields: int) -> None:
    """Commit `data` as a part of stream `s`, as a writer that checks nothing would."""
    file = put_file(store, "s/seg/x", data)
    values = {"rows": 1, "first_row_id": 0, "tokens": 0, "schema_version": SCHEMA_VERSION} | fields
    LogWriter(store, "s", "w").commit("data", file="seg/x", bytes=file.bytes, checksum=file.checksum, **values)


def arrow_stream(*tables: pa.Table, compression: str | None = None) -> bytes:
    sink = pa.BufferOutputStream()
    options = pa.ipc.IpcWriteOptions(compression=compression)
    with pa.ipc.new_stream(sink, tables[0].schema, options=options) as writer:
        for table in tables:
            writer.write_table(table)
    return sink.getvalue().to_pybytes()


def arrow_file(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_file(sink, table.schema) as writer:
        writer.write_table(table)
    return sink.getvalue()


PNG = bytes.fromhex("89504e470d0a1a0a0000000d49484452000000010000000108060000001f15c489")
FOREIGN = {
    "nothing": b"",
    "text": b"no Arrow stream",
    "zeros": bytes(4096),
    "PNG": PNG,
    "random bytes": random.Random(0).randbytes(4096),
    "end of an Arrow stream": b"\xff\xff\xff\xff\0\0\0\0",
    "Arrow file": arrow_file(metrics([1.0])),
    "fewer columns": arrow_stream(metrics([1.0]).drop_columns("t")),
    "more columns": arrow_stream(metrics([1.0]).append_column("more", pa.array([1]))),
    "other type": arrow_stream(metrics([1.0]).set_column(0, "t", pa.array([1.0], pa.float32()))),
    "half a stream": arrow_stream(metrics([1.0]))[:600],
    "no batch": arrow_stream(metrics([])),
    "twice": arrow_stream(metrics([1.0]), metrics([2.0])),
    "nulls": arrow_stream(metrics([1.0]).set_column(0, "t", pa.array([None], pa.float64()))),
}


@pytest.mark.parametrize("data", FOREIGN.values(), ids=FOREIGN)
def test_a_foreign_file_with_a_right_checksum_is_named(store: Store, data: bytes) -> None:
    commit_file(store, data)
    with pytest.raises(PartCorrupt) as caught:
        StreamReader(store, "s", METRIC).next()
    assert (caught.value.file, caught.value.record) == ("s/seg/x", 1)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=100, deadline=None)
@given(data=st.data())
def test_invalid_arrow_data_only_ever_names_the_part(make_trajectories: MakeTable, data: st.DataObject) -> None:
    good = arrow_stream(make_trajectories(0, 4))
    bad = bytearray(good)
    for _ in range(data.draw(st.integers(1, 4))):
        bad[data.draw(st.integers(0, len(good) - 1))] ^= data.draw(st.integers(1, 255))
    store = DictStore()
    commit_file(store, bytes(bad[: data.draw(st.integers(len(good) // 2, len(good)))]), rows=4)
    try:
        part = StreamReader(store, "s", TRAJECTORY).next()
    except PartCorrupt as error:
        assert (error.file, error.record) == ("s/seg/x", 1)
    else:
        assert part is not None
        assert len(part.table.to_pylist()) == 4


def test_a_record_with_a_path_outside_the_store_is_named(memory_store: MemoryStore) -> None:
    LogWriter(memory_store, "s", "w").commit("data", file="../../etc/passwd", rows=1, schema_version=SCHEMA_VERSION)
    with pytest.raises(PartCorrupt) as caught:
        StreamReader(memory_store, "s", METRIC).next()
    assert (caught.value.file, caught.value.record) == ("s/../../etc/passwd", 1)


@pytest.mark.parametrize("promised", [{"rows": 4, "vocab_size": 10}, {"rows": 5}])
def test_rows_that_break_the_rules_are_named_by_file_and_record(
    memory_store: MemoryStore, make_trajectories: MakeTable, promised: dict[str, int]
) -> None:
    commit_file(memory_store, arrow_stream(make_trajectories(0, 4)), **promised)
    with pytest.raises(PartCorrupt) as caught:
        StreamReader(memory_store, "s", TRAJECTORY).next()
    assert (caught.value.file, caught.value.record) == ("s/seg/x", 1)


def test_a_part_of_another_schema_version_can_be_passed(store: Store) -> None:
    commit_file(store, b"in another format", schema_version=SCHEMA_VERSION + 1)
    reader = StreamReader(store, "s", SCORE)
    with pytest.raises(SchemaUnknown):
        reader.next()
    assert reader.next_record() is not None


@pytest.mark.parametrize("paths", ["*/seg/*", "*/log/*"])
def test_an_object_damaged_in_transit_is_read_again(memory_store: MemoryStore, paths: str) -> None:
    writer = StreamWriter(memory_store, STREAM, METRIC, "w")
    for _ in range(3):
        writer.write(metrics([0.5]), tokens=0)
    faulty = FaultyStore(memory_store, 3, bit_flip=Fault(calls=frozenset([0, 2]), paths=paths))
    reader = StreamReader(faulty, STREAM, METRIC)
    assert len(read_all(reader)) == 3
    assert faulty.fired == {"bit_flip": 2}, "seed 3"


class Losing(MemoryStore):
    """Says every object is there already, and keeps something else under its name."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        return super().put_if_absent(path, data if "/log/" in path else b"something else") and "/log/" in path


def test_a_part_whose_name_is_taken_is_not_committed(memory_store: MemoryStore, make_trajectories: MakeTable) -> None:
    store = Losing(memory_store.url.removeprefix("memory://"))
    with pytest.raises(StreamCorrupt):
        StreamWriter(store, STREAM, TRAJECTORY, "w").write(make_trajectories(), tokens=0)
    assert stream_head(store, STREAM).part == 0
