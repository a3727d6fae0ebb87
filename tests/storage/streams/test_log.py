"""A log has one writer at a time, and its reader verifies every record."""

import dataclasses
import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest
from support.stores.dict_store import DictStore

from storage import layout
from storage.errors import Fenced, SchemaUnknown, StreamCorrupt
from storage.stores.base import BytesLike, Store
from storage.stores.memory import MemoryStore
from storage.streams.log import LogCursor, LogReader, LogWriter, backwards, check_no_hole
from storage.streams.record import Record, decode, encode
from storage.streams.sealed import seal

LOG = "streams/x"

DATA = {"file": "seg/0-a.arrows", "bytes": 9, "checksum": "00000000", "rows": 4, "first_row_id": 0, "tokens": 10}
VERSIONS = {"min_policy_version": 3, "max_policy_version": 5, "schema_version": 1}


def commit_data(log: LogWriter) -> Record:
    return log.commit("data", **DATA, **VERSIONS)


def read_all(reader: LogReader) -> list[Record]:
    return list(iter(reader.next, None))


def file(seq: int) -> str:
    return f"{LOG}/{layout.record(seq)}"


def test_records_read_back_in_the_order_of_their_commits(store: Store) -> None:
    writer = LogWriter(store, LOG, "w")
    committed = [commit_data(writer), writer.commit("checkpoint", body={"a": [1, {"b": None}]}), writer.commit("end")]
    fence, *read = read_all(LogReader(store, LOG))
    assert (fence.kind, fence.epoch, fence.writer, fence.prev) == ("fence", 0, "w", "")
    assert read == committed
    assert [record.seq for record in read] == [1, 2, 3]


def test_the_cursor_sums_the_records_it_has_passed(store: Store) -> None:
    writer = LogWriter(store, LOG, "w")
    reader = LogReader(store, LOG)
    assert reader.to_head() == dataclasses.replace(LogCursor(), seq=1, epoch=0, prev=reader.cursor.prev)
    commit_data(writer)
    writer.commit("data", **DATA | {"rows": 6, "tokens": 1})
    writer.commit("data", **DATA, min_policy_version=1, max_policy_version=2)
    head = reader.to_head()
    assert (head.part, head.rows, head.tokens) == (3, 14, 21)
    assert (head.min_policy_version, head.max_policy_version) == (1, 5)
    assert head == writer.cursor


def test_a_cursor_survives_json_and_resumes_exactly_there(store: Store) -> None:
    writer = LogWriter(store, LOG, "w")
    committed = [commit_data(writer) for _ in range(4)]
    reader = LogReader(store, LOG)
    for _ in range(3):
        reader.next()
    cursor = LogCursor.from_json(json.loads(json.dumps(reader.cursor.to_json())))
    assert cursor == reader.cursor
    assert read_all(LogReader(store, LOG, cursor)) == committed[2:]


@pytest.mark.parametrize(
    "values", [{"seq": 0}, *(LogCursor().to_json() | c for c in ({"seq": "1"}, {"seq": -1}, {"ended": 0}, {"new": 1}))]
)
def test_an_invalid_cursor_is_refused(values: dict[str, object]) -> None:
    with pytest.raises(ValueError):
        LogCursor.from_json(values)


def test_a_cursor_of_another_or_a_shortened_log_is_refused(store: Store) -> None:
    cursor = LogWriter(store, LOG, "w").cursor
    LogWriter(store, "streams/y", "w")
    with pytest.raises(StreamCorrupt) as caught:
        LogReader(store, "streams/y", cursor)
    assert caught.value.file == "streams/y/log/000000000000.json"
    with pytest.raises(StreamCorrupt) as caught:
        LogReader(store, LOG, dataclasses.replace(cursor, seq=5))
    assert caught.value.file == file(4)


def test_each_new_writer_opens_the_next_epoch(store: Store) -> None:
    for epoch in range(3):
        writer = LogWriter(store, LOG, f"w{epoch}")
        assert writer.epoch == epoch
        assert commit_data(writer).part == epoch
    kinds = [(record.kind, record.epoch) for record in read_all(LogReader(store, LOG))]
    assert kinds == [(kind, epoch) for epoch in range(3) for kind in ("fence", "data")]


def test_a_zombie_writer_is_fenced_and_commits_nothing(store: Store) -> None:
    zombie = LogWriter(store, LOG, "old")
    commit_data(zombie)
    newer = LogWriter(store, LOG, "new")
    records = read_all(LogReader(store, LOG))
    for _ in range(2):
        with pytest.raises(Fenced):
            commit_data(zombie)
    assert read_all(LogReader(store, LOG)) == records
    commit_data(newer)
    with pytest.raises(Fenced):
        zombie.commit("end")


def test_only_a_new_writer_commits_after_an_end(store: Store) -> None:
    writer = LogWriter(store, LOG, "w")
    writer.commit("end")
    reader = LogReader(store, LOG)
    assert reader.to_head().ended
    with pytest.raises(ValueError):
        commit_data(writer)
    commit_data(LogWriter(store, LOG, "w2"))
    assert not reader.to_head().ended


@pytest.mark.parametrize("body", [{1: "int key"}, {"a": (1, 2)}, {"a": float("nan")}, {"a": {1, 2}}])
def test_a_body_that_json_would_change_is_refused(store: Store, body: dict[object, object]) -> None:
    writer = LogWriter(store, LOG, "w")
    with pytest.raises((ValueError, TypeError)):
        writer.commit("checkpoint", body=body)
    assert writer.commit("checkpoint", body={"a": [1, 2]}).seq == 1


class LostReplies(MemoryStore):
    """Stores, but every reply is lost and the repeated request finds the object there."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        super().put_if_absent(path, data)
        return False


def test_a_commit_whose_reply_is_lost_is_recognized(memory_store: MemoryStore) -> None:
    store = LostReplies(memory_store.url.removeprefix("memory://"))
    writer = LogWriter(store, LOG, "w")
    committed = [commit_data(writer) for _ in range(3)]
    assert read_all(LogReader(store, LOG))[1:] == committed


class Raced(MemoryStore):
    """Lets a rival in, once, right before this store's first write."""

    rival: Callable[[], object] | None = None

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        if self.rival:
            rival, self.rival = self.rival, None
            rival()
        return super().put_if_absent(path, data)


def test_the_slower_of_two_opening_writers_has_the_later_epoch(memory_store: MemoryStore) -> None:
    raced = Raced(memory_store.url.removeprefix("memory://"))
    rivals: list[LogWriter] = []
    raced.rival = lambda: rivals.append(LogWriter(memory_store, LOG, "rival"))
    slower = LogWriter(raced, LOG, "slower")
    assert (rivals[0].epoch, slower.epoch) == (0, 1)
    with pytest.raises(Fenced):
        commit_data(rivals[0])
    commit_data(slower)


def test_a_foreign_record_of_the_writers_epoch_is_corruption(memory_store: MemoryStore) -> None:
    writer = LogWriter(memory_store, LOG, "w")
    record = commit_data(writer)
    forged = dataclasses.replace(record, seq=2, nonce="other", prev=writer.cursor.prev, part=1)
    memory_store.put(file(2), encode(forged))
    with pytest.raises(StreamCorrupt):
        commit_data(writer)


@pytest.mark.parametrize("kind", ["fence", "data", "checkpoint", "end"])
def test_any_flipped_bit_of_the_newest_record_is_detected(kind: str) -> None:
    store = DictStore()
    writer = LogWriter(store, LOG, "w")
    commits: dict[str, Callable[[], object]] = {
        "fence": lambda: None,
        "data": lambda: commit_data(writer),
        "checkpoint": lambda: writer.commit("checkpoint", body={"rate": 1e-05, "crc": 'x"crc": "', "name": "é\ud800"}),
        "end": lambda: writer.commit("end"),
    }
    commits[kind]()
    head = writer.cursor
    newest = file(head.seq - 1)
    good = store.objects[newest]
    for position, bit in itertools.product(range(len(good)), range(8)):
        store.objects[newest] = good[:position] + bytes([good[position] ^ 1 << bit]) + good[position + 1 :]
        with pytest.raises(StreamCorrupt) as caught:
            LogReader(store, LOG).to_head()
        assert caught.value.file == newest, (position, bit)
    store.objects[newest] = good
    assert LogReader(store, LOG).to_head() == head


FIELDS = {"epoch": 0, "nonce": "n", "writer": "w", "prev": "", "seq": 3}
RECORD = FIELDS | DATA | VERSIONS | {
    "kind": "data", "part": 2, "incarnation": 0, "group_ids": [0, 1], "last_group_id": 1, "missing_groups": [],
    "group_size": 4, "vocab_size": 9,
}  # fmt: skip


def test_a_shortened_record_or_one_without_checksum_or_field_is_damaged() -> None:
    good = seal(RECORD)
    assert decode(good, "log/3").group_ids == [0, 1]
    for data in (
        *(good[:length] for length in range(len(good))),
        json.dumps(RECORD).encode(),
        seal({name: value for name, value in RECORD.items() if name != "group_ids"}),
        seal(RECORD | {"missing_groups": ["x"]}),
    ):
        with pytest.raises(StreamCorrupt):
            decode(data, "log/3")


@pytest.mark.parametrize(
    "values", [RECORD | {"colour": "red"}, FIELDS | {"kind": "weird"}, FIELDS | {"kind": "fence", "format": 9}]
)
def test_a_record_of_another_version_is_not_called_damaged(values: dict[str, object]) -> None:
    with pytest.raises(SchemaUnknown):
        decode(seal(values), "log/3")


def test_reading_backwards_verifies_each_record(memory_store: MemoryStore) -> None:
    writer = LogWriter(memory_store, LOG, "w")
    committed = [commit_data(writer) for _ in range(4)]
    memory_store.put(file(2), encode(dataclasses.replace(committed[1], rows=9)))
    records = backwards(memory_store, LOG, writer.cursor)
    assert [next(records).seq, next(records).seq] == [4, 3]
    for damage in (lambda: None, lambda: memory_store.delete(file(2))):
        damage()
        with pytest.raises(StreamCorrupt) as caught:
            list(backwards(memory_store, LOG, writer.cursor))
        assert caught.value.file == file(2)


@pytest.mark.parametrize("seed", range(2))
def test_racing_writers_leave_one_chain(seed: int, memory_store: MemoryStore) -> None:
    chooser = random.Random(seed)
    committed: list[Record] = []
    fenced: set[str] = set()
    writers: dict[str, LogWriter] = {}
    for number in range(4):
        name = f"w{number}"
        writers[name] = LogWriter(memory_store, LOG, name)
        for _ in range(20):
            chosen = chooser.choice(sorted(writers))
            try:
                committed.append(commit_data(writers[chosen]))
            except Fenced:
                fenced.add(chosen)
            else:
                assert chosen == name, f"seed {seed}: {chosen} committed after {name} took over"
    assert fenced == {"w0", "w1", "w2"}, f"seed {seed}"
    data = [record for record in read_all(LogReader(memory_store, LOG)) if record.kind == "data"]
    assert data == committed, f"seed {seed}"


@pytest.mark.parametrize(
    "change",
    [
        {"seq": 7},
        {"prev": "0" * 64},
        {"part": 3},
        {"epoch": 0},
        {"epoch": 2},
        {"kind": "fence"},
        {"kind": "fence", "epoch": 3},
    ],
)
def test_a_record_that_breaks_the_chain_is_named(memory_store: MemoryStore, change: dict[str, Any]) -> None:
    LogWriter(memory_store, LOG, "w")
    writer = LogWriter(memory_store, LOG, "w")
    good = dataclasses.replace(commit_data(writer), seq=3, part=1, prev=writer.cursor.prev)
    memory_store.put(file(3), encode(good))
    assert LogReader(memory_store, LOG).to_head().part == 2
    memory_store.put(file(3), encode(dataclasses.replace(good, **change)))
    with pytest.raises(StreamCorrupt) as caught:
        LogReader(memory_store, LOG).to_head()
    assert caught.value.file == file(3)


def test_a_record_after_the_end_is_named(memory_store: MemoryStore) -> None:
    writer = LogWriter(memory_store, LOG, "w")
    end = writer.commit("end")
    memory_store.put(file(2), encode(dataclasses.replace(end, seq=2, prev=writer.cursor.prev)))
    with pytest.raises(StreamCorrupt) as caught:
        LogReader(memory_store, LOG).to_head()
    assert caught.value.file == file(2)


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b'{"seq": 1',
        b"\xff",
        b"[]",
        b"[" * 100_000,
        # Near the depth that Python's parser can bear.
        *(b'{"body": ' + b'{"a": ' * n + b"1" + b"}" * n + b', "crc": "00000000"}' for n in (940, 970, 997)),
        b"9" * 5_000,
        seal({}),
        b'{"kind": NaN, "crc": "00000000"}',
        b'{"kind": "end", "crc": "00000000"}',
        seal({"kind": "end"}),
        b'{"kind": "end"}',
        seal(FIELDS | {"kind": "end", "seq": 1.0}),
        seal(FIELDS | {"kind": "end", "epoch": True}),
    ],
)
def test_an_invalid_record_is_named(data: bytes) -> None:
    with pytest.raises(StreamCorrupt) as caught:
        decode(data, "log/1")
    assert caught.value.file == "log/1"


@pytest.mark.parametrize("back", [1, 2, 4])
def test_a_hole_at_the_end_of_a_log_is_named(store: Store, back: int) -> None:
    writer = LogWriter(store, LOG, "w")
    for _ in range(6):
        commit_data(writer)
    reader = LogReader(store, LOG)
    check_no_hole(store, LOG, reader.to_head())
    store.delete(file(6 - back))
    head = LogReader(store, LOG).to_head()
    with pytest.raises(StreamCorrupt) as caught:
        check_no_hole(store, LOG, head)
    assert caught.value.file == file(6 - back)


def test_a_new_writer_leaves_the_place_of_a_deleted_record_empty(store: Store) -> None:
    writer = LogWriter(store, LOG, "w")
    for _ in range(3):
        commit_data(writer)
    store.delete(file(2))
    with pytest.raises(StreamCorrupt) as caught:
        LogWriter(store, LOG, "v")
    assert caught.value.file == file(2)
    assert not store.exists(file(2))


def test_a_folder_in_place_of_the_next_record_is_named(memory_store: MemoryStore) -> None:
    writer = LogWriter(memory_store, LOG, "w")
    (memory_store.root / file(1)).mkdir()
    with pytest.raises(StreamCorrupt) as caught:
        commit_data(writer)
    assert caught.value.file == file(1)
