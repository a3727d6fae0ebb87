"""A checkpoint is committed whole, with its state, or the previous one stays the latest."""

import pytest

from storage import layout
from storage.checkpoints import (
    CheckpointWriter,
    checkpoints_backwards,
    first_of,
    load_file,
    read_latest,
)
from storage.errors import Fenced, StreamCorrupt
from storage.stores.base import BytesLike, Store
from storage.stores.memory import MemoryStore
from storage.streams.files import FileRef
from storage.streams.log import LogWriter


def test_files_and_state_come_back_as_committed(store: Store) -> None:
    files: dict[str, BytesLike] = {
        "model.safetensors": b"weights" * 300_000,
        "rng/0": b"",
        "optimizer": memoryview(b"moments"),
    }
    committed = CheckpointWriter(store).commit(7, files, {"ledger": {"trained": 5}})
    latest = read_latest(store)
    assert latest is not None
    assert latest == committed
    assert (latest.step, latest.state, latest.incarnation) == (7, {"ledger": {"trained": 5}}, 0)
    assert {name: load_file(store, ref) for name, ref in latest.files.items()} == files
    folders = {ref.path.rsplit("/", 1)[0] for ref in latest.files.values()}
    assert all(folder.startswith("checkpoints/data/00000007-") for folder in folders)


def test_each_trainer_is_the_next_incarnation(store: Store) -> None:
    assert read_latest(store) is None
    for incarnation in range(3):
        writer = CheckpointWriter(store)
        assert writer.incarnation == incarnation
        if incarnation:
            assert writer.latest is not None
            assert (writer.latest.step, writer.latest.incarnation) == (incarnation - 1, incarnation - 1)
        writer.commit(incarnation, {}, {})
        assert writer.latest == read_latest(store)


def test_an_older_trainer_is_fenced_and_changes_nothing(store: Store) -> None:
    older = CheckpointWriter(store)
    older.commit(1, {}, {})
    newer = CheckpointWriter(store)
    with pytest.raises(Fenced):
        older.commit(2, {"model": b"zombie"}, {})
    assert older.latest == newer.latest == read_latest(store)


def test_an_earlier_checkpoint_is_adopted_without_copying_its_files(store: Store) -> None:
    first = CheckpointWriter(store).commit(4, {"model": b"good"}, {"branch": "first"})
    second = CheckpointWriter(store).commit(9, {"model": b"to be damaged"}, {"branch": "second"})
    writer = CheckpointWriter(store)
    files = store.list("checkpoints/data")
    adopted = writer.adopt(first, {"branch": "third"})
    assert store.list("checkpoints/data") == files
    assert (adopted.step, adopted.state, adopted.incarnation) == (4, {"branch": "third"}, 2)
    assert adopted.files == first.files
    assert load_file(store, adopted.files["model"]) == b"good"
    assert writer.latest == read_latest(store) == adopted
    assert list(checkpoints_backwards(store)) == [adopted, second, first]


def test_checkpoints_are_listed_newest_first(store: Store) -> None:
    assert list(checkpoints_backwards(store)) == []
    committed = []
    for _ in range(3):
        writer = CheckpointWriter(store)
        committed += [writer.commit(step, {"model": b"%d" % step}, {}) for step in range(2)]
    assert list(checkpoints_backwards(store)) == committed[::-1]
    assert list(checkpoints_backwards(store, layout.WEIGHTS)) == []


def test_first_of_returns_the_first_checkpoint_of_an_incarnation(store: Store) -> None:
    first = []
    for steps in (2, 0, 3):
        writer = CheckpointWriter(store)
        committed = [writer.commit(step, {}, {"steps": steps}) for step in range(steps)]
        first.append(committed[0] if committed else None)
    assert [first_of(store, incarnation) for incarnation in range(4)] == [*first, None]
    assert first[1] is None


def test_checkpoints_after_a_damaged_record_stay_readable(memory_store: MemoryStore) -> None:
    writer = CheckpointWriter(memory_store)
    committed = [writer.commit(step, {}, {}) for step in range(70)]
    name = f"checkpoints/{layout.record(11)}"
    memory_store.put(name, bytes(memory_store.get(name)).replace(b'"step": 10', b'"step": 50'))
    assert read_latest(memory_store) == CheckpointWriter(memory_store).latest == committed[-1]
    checkpoints = checkpoints_backwards(memory_store)
    assert [next(checkpoints) for _ in range(59)] == committed[:10:-1]
    with pytest.raises(StreamCorrupt) as caught:
        next(checkpoints)
    assert caught.value.file == name


class FailingRecords(MemoryStore):
    """Once armed, fails to write commit records."""

    armed = False

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        if self.armed and "/log/" in path:
            raise OSError("the power went")
        return super().put_if_absent(path, data)


def test_a_crash_before_the_record_leaves_the_previous_checkpoint(memory_store: MemoryStore) -> None:
    store = FailingRecords(memory_store.url.removeprefix("memory://"))
    writer = CheckpointWriter(store)
    first = writer.commit(1, {"model": b"first"}, {"consumed": 1})
    store.armed = True
    with pytest.raises(OSError):
        writer.commit(2, {"model": b"second"}, {"consumed": 2})
    assert len(store.list("checkpoints/data")) == 2
    assert read_latest(memory_store) == first
    assert CheckpointWriter(memory_store).latest == first


def test_a_damaged_file_is_named(memory_store: MemoryStore) -> None:
    ref = CheckpointWriter(memory_store).commit(1, {"model": b"weights"}, {}).files["model"]
    memory_store.put(ref.path, b"weighty")
    with pytest.raises(StreamCorrupt) as caught:
        load_file(memory_store, ref)
    assert caught.value.file == ref.path
    with pytest.raises(StreamCorrupt) as caught:
        load_file(memory_store, FileRef(path="gone", bytes=1, checksum="00000000"))
    assert caught.value.file == "gone"


@pytest.mark.parametrize("body", [{}, {"step": 1, "files": [], "state": {}}, {"step": 1, "files": {"a": {"b": 1}}}])
def test_a_record_without_a_checkpoint_is_named(store: Store, body: dict[str, object]) -> None:
    LogWriter(store, layout.CHECKPOINTS, "w").commit("checkpoint", body=body)
    with pytest.raises(StreamCorrupt) as caught:
        read_latest(store)
    assert caught.value.file == "checkpoints/log/000000000001.json"
