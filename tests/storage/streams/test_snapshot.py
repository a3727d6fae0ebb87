"""Snapshots make opening a long log fast, and a wrong snapshot changes nothing."""

import json
import random
from collections.abc import Callable

import pytest
from support.stores.dict_store import DictStore
from support.stores.slow_store import SlowStore

from storage import layout
from storage.errors import Fenced, StreamCorrupt
from storage.stores.base import BytesLike
from storage.streams import snapshot
from storage.streams.log import LogCursor, LogReader, LogWriter
from storage.streams.sealed import seal
from storage.streams.stream import stream_head

LOG = "streams/x"
HEAD = f"{LOG}/{layout.HEAD}"
DATA = {"file": "seg/0-a", "bytes": 9, "checksum": "00000000", "rows": 4, "first_row_id": 0, "tokens": 10}

Damage = Callable[[DictStore], None]


def commit(log: LogWriter, times: int) -> None:
    for _ in range(times):
        log.commit("data", **DATA)


def read_from_start(store: DictStore, path: str = LOG) -> LogCursor:
    return LogReader(store, path).to_head()


def test_opening_a_long_log_reads_only_its_last_records() -> None:
    store = SlowStore()
    commit(LogWriter(store, LOG, "w"), 500)
    head = read_from_start(store)
    for open_head in (lambda: LogReader.at_head(store, LOG).cursor, lambda: stream_head(store, LOG)):
        store.gets.clear()
        assert open_head() == head
        assert len(store.gets) <= snapshot.EVERY + 3
    store.gets.clear()
    writer = LogWriter(store, LOG, "w2")
    assert (writer.epoch, writer.cursor.part) == (1, 500)
    assert len(store.gets) <= snapshot.EVERY + 3


def test_the_writer_leaves_a_snapshot_every_64_records() -> None:
    store = DictStore()
    writer = LogWriter(store, LOG, "w")
    seen = []
    for _ in range(4 * snapshot.EVERY):
        commit(writer, 1)
        values = snapshot.read_snapshot(store, LOG)
        seen.append(values["seq"] if values else 0)
    assert sorted(set(seen)) == [0, 64, 128, 192, 256]
    assert all(record - at <= snapshot.EVERY for record, at in enumerate(seen, start=1))


def damage_head(change: Callable[[bytes], bytes]) -> Damage:
    def damage(store: DictStore) -> None:
        store.objects[HEAD] = change(store.objects[HEAD])

    return damage


def with_cursor(**changes: object) -> Damage:
    def change(data: bytes) -> bytes:
        return seal({"cursor": json.loads(data)["cursor"] | changes})

    return damage_head(change)


def of_another_log(store: DictStore) -> None:
    commit(LogWriter(store, "other", "w"), 200)
    store.objects[HEAD] = store.objects[f"other/{layout.HEAD}"]


DAMAGES: dict[str, Damage] = {
    "missing": lambda store: store.delete(HEAD),
    "empty": damage_head(lambda data: b""),
    "torn": damage_head(lambda data: data[:-9]),
    "no JSON": damage_head(lambda data: b"\xff\xd8\xff"),
    "a list": damage_head(lambda data: b"[]"),
    "deeply nested": damage_head(lambda data: b"[" * 100_000),
    "sums altered": damage_head(lambda data: data.replace(b'"rows": ', b'"rows": 1')),
    "checksum taken away": damage_head(lambda data: b"{" + data[data.index(b'"cursor"') :]),
    "no cursor": damage_head(lambda data: seal({"cursor": 7})),
    "half a cursor": damage_head(lambda data: seal({"cursor": {"seq": 64}})),
    "of the future": with_cursor(seq=10_000),
    "before the start": with_cursor(seq=-3),
    "another record's": with_cursor(seq=63),
    "of another log": of_another_log,
}


@pytest.mark.parametrize("damage", DAMAGES.values(), ids=DAMAGES)
def test_a_snapshot_that_is_wrong_changes_nothing(damage: Damage) -> None:
    store = DictStore()
    older = LogWriter(store, LOG, "w")
    commit(older, 200)
    head = read_from_start(store)
    snapshot_bytes = store.objects[HEAD]
    damage(store)
    assert store.objects.get(HEAD) != snapshot_bytes
    assert stream_head(store, LOG) == head
    newer = LogWriter(store, LOG, "w2")
    assert (newer.epoch, newer.cursor.part, newer.cursor.rows) == (1, 200, 800)
    with pytest.raises(Fenced):
        commit(older, 1)
    commit(newer, 1)
    assert read_from_start(store) == stream_head(store, LOG) == newer.cursor


def test_any_flipped_bit_of_a_snapshot_changes_nothing() -> None:
    store, chooser = DictStore(), random.Random(0)
    commit(LogWriter(store, LOG, "w"), 70)
    head, good = read_from_start(store), store.objects[HEAD]
    for position in chooser.sample(range(len(good)), 60):
        bit = chooser.randrange(8)
        store.objects[HEAD] = good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :]
        assert snapshot.read_snapshot(store, LOG) is None, f"byte {position}, bit {bit}"
        assert stream_head(store, LOG) == head, f"byte {position}, bit {bit}"


def test_a_snapshot_that_outlived_its_records_is_ignored() -> None:
    store = DictStore()
    commit(LogWriter(store, LOG, "w"), 130)
    for seq in range(100, 131):
        store.delete(f"{LOG}/{layout.record(seq)}")
    assert stream_head(store, LOG).seq == 100
    writer = LogWriter(store, LOG, "w2")
    commit(writer, 100)
    assert stream_head(store, LOG) == read_from_start(store) == writer.cursor


def log_with_a_hole(store: DictStore, records: int, hole: int) -> LogWriter:
    writer = LogWriter(store, LOG, "w")
    commit(writer, records - 1)
    store.delete(f"{LOG}/{layout.record(hole)}")
    return writer


def test_a_missing_record_before_a_snapshot_is_named_at_every_look() -> None:
    store = DictStore()
    writer = log_with_a_hole(store, 100, 30)
    reader = LogReader(store, LOG)
    for _ in range(3):
        with pytest.raises(StreamCorrupt) as caught:
            reader.to_head()
        assert (caught.value.file, reader.cursor.seq) == (f"{LOG}/{layout.record(30)}", 30)
    assert stream_head(store, LOG) == writer.cursor
    commit(LogWriter(store, LOG, "w2"), 1)
    store.delete(HEAD)
    for _ in range(2 * snapshot.EVERY):
        with pytest.raises(StreamCorrupt):
            reader.next()


def test_a_missing_record_is_named_to_a_reader_that_was_at_the_head() -> None:
    store = DictStore()
    writer = LogWriter(store, LOG, "w")
    reader = LogReader(store, LOG)
    reader.to_head()
    commit(writer, 30)
    store.delete(f"{LOG}/{layout.record(20)}")
    assert [reader.to_head().seq for _ in range(5)] == [20] * 5
    commit(writer, 70)
    with pytest.raises(StreamCorrupt) as caught:
        for _ in range(snapshot.EVERY):
            reader.next()
    assert caught.value.file == f"{LOG}/{layout.record(20)}"


@pytest.mark.parametrize("hole", [64, 99])
def test_a_hole_after_the_last_snapshot_is_the_head(hole: int) -> None:
    store = DictStore()
    log_with_a_hole(store, 100, hole)
    reader = LogReader(store, LOG)
    assert [reader.to_head().seq for _ in range(2 * snapshot.EVERY)] == [hole] * 2 * snapshot.EVERY


class NoRoomForHints(DictStore):
    """Has room for records, but not for a snapshot, while `full`."""

    full = True
    refused = 0

    def put(self, path: str, data: BytesLike) -> None:
        if self.full:
            self.refused += 1
            raise OSError("no room")
        super().put(path, data)


def test_a_snapshot_that_cannot_be_written_stops_the_commit() -> None:
    store = NoRoomForHints()
    writer = LogWriter(store, LOG, "w")
    commit(writer, 63)
    for _ in range(2):
        with pytest.raises(OSError):
            commit(writer, 1)
    assert store.refused == 2
    assert read_from_start(store) == writer.cursor
    assert writer.cursor.part == 63
    store.full = False
    commit(writer, 1)
    assert read_from_start(store).part == 64
