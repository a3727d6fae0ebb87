"""Parts are found in long logs by few reads, and merged rows are the stream's own, whatever is damaged."""

from collections.abc import Iterable, Sequence

import pyarrow as pa
import pytest
from support.stores.dict_store import DictStore
from support.stores.faulty_store import flipped
from support.stores.slow_store import SlowStore
from support.streams.rows import part_files

from storage import layout
from storage.errors import Fenced, StreamCorrupt
from storage.schema import METRIC
from storage.streams.log import LogWriter
from storage.streams.merged import EVERY, MergedReader, PartFinder, merge_parts
from storage.streams.stream import StreamReader, StreamWriter

STREAM, MERGED = layout.metrics("train", 0), layout.merged_metrics("train", 0)


def rows(values: Iterable[int]) -> pa.Table:
    stamp = {"t": 0.0, "incarnation": 0, "name": "loss"}
    return pa.Table.from_pylist([stamp | {"policy_version": v, "value": v} for v in values], schema=METRIC)


def write(store: DictStore, *epochs: int) -> None:
    """Parts of one, two and three rows in turn; a writer for each of `epochs`, which is the number of its parts."""
    for parts in epochs:
        writer = StreamWriter(store, STREAM, METRIC, "train-0")
        for _ in range(parts):
            writer.write(rows(range(writer.rows, writer.rows + 1 + writer.parts % 3)), tokens=0)


def merge(store: DictStore) -> None:
    merge_parts(store, STREAM, MERGED, METRIC, "train-0")


def part_sizes(reader: MergedReader) -> list[int]:
    """Rows of each part, which must come in the order of the stream and with no gap."""
    tables = [part.table for part in reader.readable()]
    values = [value for table in tables for value in table["policy_version"].to_pylist()]
    assert values == list(range(values[0], values[0] + len(values))) if values else True
    return [table.num_rows for table in tables]


def read(store: DictStore) -> list[int]:
    return part_sizes(MergedReader(store, STREAM, MERGED, METRIC))


def num_rows(store: DictStore) -> int:
    return sum(part.record.rows for part in StreamReader(store, STREAM, METRIC).readable())


@pytest.mark.parametrize("epochs", [(1,), (3, 0, 0, 4), (16, 1)])
def test_every_part_is_found_by_its_rows(epochs: Sequence[int]) -> None:
    store = DictStore()
    write(store, *epochs)
    records = list(iter(StreamReader(store, STREAM, METRIC).next_record, None))
    finder = PartFinder(store, STREAM)
    for record in records:
        for row in range(record.first_row_id, record.first_row_id + record.rows):
            assert finder.first(lambda r, row=row: r.first_row_id + r.rows > row) == record
    assert finder.first(lambda record: record.first_row_id > records[-1].first_row_id) is None
    write(store, 1)
    found = finder.first(lambda record: record.first_row_id > records[-1].first_row_id)
    assert found is not None, "a part that was committed since"
    assert found.part == len(records)


def test_a_part_is_found_by_few_reads() -> None:
    store = SlowStore()
    log = LogWriter(store, STREAM, "train-0")
    for _ in range(1000):
        log.commit("data")
    store.gets.clear()
    assert PartFinder(store, STREAM).first(lambda record: record.part >= 777) is not None
    assert len(store.gets) <= 22


def test_a_damaged_record_hides_those_behind_it() -> None:
    store = DictStore()
    write(store, 16)
    path = f"{STREAM}/{layout.record(8)}"
    store.objects[path] = flipped(store.objects[path], 100)
    found = PartFinder(store, STREAM).first(lambda record: record.part >= 5)
    assert found is not None
    assert found.part == 5
    with pytest.raises(StreamCorrupt) as raised:
        PartFinder(store, STREAM).first(lambda record: record.part >= 10)
    assert raised.value.file == path


@pytest.fixture(scope="module")
def objects() -> dict[str, bytes]:
    """A stream of two writers, whose first two times `EVERY` parts are merged."""
    store = DictStore()
    write(store, 100, 2 * EVERY - 98)
    merge(store)
    return store.objects


@pytest.fixture
def store(objects: dict[str, bytes]) -> DictStore:
    return DictStore(dict(objects))


def test_a_merged_stream_is_read_whole_in_few_parts(store: DictStore) -> None:
    assert len(read(store)) == 2 + 2
    assert sum(read(store)) == num_rows(store)
    before = set(store.objects)
    merge(store)
    added = {path for path in store.objects if path not in before}
    assert added == {f"{MERGED}/{layout.record(3)}"}, "a fence: too few parts are left to merge"


def test_a_reader_goes_on_in_the_stream_itself(store: DictStore) -> None:
    reader = MergedReader(store, STREAM, MERGED, METRIC)
    assert len(part_sizes(reader)) == 2 + 2
    write(store, 3)
    assert len(part_sizes(reader)) == 3
    assert part_sizes(reader) == []


@pytest.mark.parametrize("part", range(2))
@pytest.mark.parametrize("is_record", [False, True], ids=["rows", "record"])
def test_rows_that_were_merged_and_damaged_are_read_from_the_stream(
    store: DictStore, part: int, is_record: bool
) -> None:
    path = f"{MERGED}/{layout.record(1 + part)}" if is_record else part_files(store, MERGED)[part]
    store.objects[path] = flipped(store.objects[path], 8 * len(store.objects[path]) - 9)
    sizes = read(store)
    assert len(sizes) == part + (2 - part) * EVERY + 2
    assert sum(sizes) == num_rows(store)


def test_parts_from_a_damaged_one_on_are_not_merged(store: DictStore) -> None:
    store.delete_tree(MERGED)
    del store.objects[part_files(store, STREAM)[EVERY + 44]]
    with pytest.raises(StreamCorrupt):
        merge(store)
    assert [part.record.part for part in StreamReader(store, MERGED, METRIC).readable()] == [0]


def test_a_process_that_was_replaced_merges_nothing(store: DictStore) -> None:
    late = StreamWriter(store, MERGED, METRIC, "late")
    merge(store)
    with pytest.raises(Fenced):
        late.write(rows([0]), tokens=0)
