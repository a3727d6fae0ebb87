"""The `evaluations/` folder of a run: written once, read by everyone, damaged files named."""

import pytest
from support.stores.dict_store import DictStore

from millrace.evaluation.results import ResultsReader, read_result, write_result
from storage import layout
from storage.errors import StreamCorrupt


def result(version: int, accuracy: float = 0.5) -> dict[str, object]:
    return {"policy_version": version, "accuracy": accuracy, "prompts": 8, "t": 50.0, "weights_checksum": "1a5c82b5"}


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


def test_a_result_is_read_as_it_was_written(dict_store: DictStore) -> None:
    write_result(dict_store, result(7))
    assert read_result(dict_store, 7) == result(7)
    assert read_result(dict_store, 8) is None


def test_results_are_in_order_of_versions_and_a_new_one_replaces_the_old(dict_store: DictStore) -> None:
    reader = ResultsReader(dict_store)
    assert reader.read() == []
    for version in (20, 0, 5):
        write_result(dict_store, result(version))
    assert reader.read() == [result(0), result(5), result(20)]
    write_result(dict_store, result(5, 0.75))
    assert reader.read() == [result(0), result(5, 0.75), result(20)]


def test_a_file_that_has_not_changed_is_not_read_again(dict_store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    write_result(dict_store, result(0))
    reader = ResultsReader(dict_store)
    found = reader.read()
    monkeypatch.setattr(dict_store, "get", lambda path: pytest.fail(f"{path} was read again"))
    assert reader.read() == found


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[]", b"null", b'{"policy_version": 3}', b'{"policy_version": "x", "accuracy": 1}']
)
def test_a_damaged_result_is_named(dict_store: DictStore, data: bytes) -> None:
    dict_store.put(layout.evaluation(3), data)
    write_result(dict_store, result(5))
    with pytest.raises(StreamCorrupt, match=r"evaluations/00000003\.json: expected the result of an evaluation"):
        read_result(dict_store, 3)
    reader = ResultsReader(dict_store)
    assert reader.read() == [result(5)]
    assert [error.file for error in reader.damaged] == [layout.evaluation(3)]
    write_result(dict_store, result(3))
    assert reader.read() == [result(3), result(5)]
    assert reader.damaged == []
