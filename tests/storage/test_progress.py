"""Status records are overwritten, and a damaged record counts as absent."""

from storage import layout
from storage.progress import read_progress, read_status, write_progress
from storage.stores.base import Store


def test_the_newest_status_record_of_each_replica_is_read(store: Store) -> None:
    assert read_progress(store) == {}
    write_progress(store, "generate", 0, {"rows": 1})
    write_progress(store, "generate", 0, {"rows": 2})
    write_progress(store, "generate", 1, {"rows": 3})
    write_progress(store, "sync_weights", 0, {"pushes": 4})
    assert read_progress(store) == {
        "generate-0": {"rows": 2},
        "generate-1": {"rows": 3},
        "sync_weights-0": {"pushes": 4},
    }


def test_a_torn_foreign_or_changed_status_record_counts_as_absent(store: Store) -> None:
    for replica in (0, 1):
        write_progress(store, "train", replica, {"step": 100})
    path = layout.progress("train", 1)
    changed = bytes(store.get(path)).replace(b"100", b"900")
    for data in (changed, b"", b'{"rows": ', b"\xff\xfe", b"[1]", b"{}", b'{"t": 1.0}'):
        store.put(path, data)
        assert read_progress(store) == {"train-0": {"step": 100}}
        assert read_status(store, "train", 1) == {}


def test_values_that_json_does_not_have_are_converted(store: Store) -> None:
    write_progress(store, "train", 0, {"share": float("nan"), "counts": {10: 1, 9: 2}, "late": (1, 2)})
    assert read_status(store, "train", 0) == {"share": None, "counts": {"10": 1, "9": 2}, "late": [1, 2]}
