"""The `evaluations/` folder of a run: written once, read by everyone, damaged files named."""

import os
from pathlib import Path

import pytest
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore

from millrace.evaluation.results import ResultsReader, best_result, measures_by_set, read_result, write_result
from storage import layout
from storage.stores.local import LocalStore


def result(version: int, accuracy: float = 0.5) -> dict[str, object]:
    return {"policy_version": version, "accuracy": accuracy, "prompts": 8, "t": 50.0, "weights_checksum": "1a5c82b5"}


@pytest.fixture
def dict_store() -> DictStore:
    return DictStore()


def test_a_result_is_durable_once_it_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda file: flushed.append(str(Path(f"/proc/self/fd/{file}").readlink())))
    write_result(LocalStore(tmp_path), result(7))
    folder = str(tmp_path / layout.EVALUATIONS)
    assert any(name.startswith(f"{folder}/") for name in flushed), "the file"
    assert flushed[-1] == folder, "and then its name"


def test_a_torn_result_counts_as_absent_and_is_replaced(tmp_path: Path) -> None:
    store = FaultyStore(LocalStore(tmp_path), seed=1, torn_put=Fault(calls=frozenset({1})))
    write_result(store, result(7))
    with pytest.raises(OSError):
        write_result(store, result(7, 0.75))
    assert store.fired["torn_put"] == 1
    assert read_result(store, 7) is None
    write_result(store, result(7, 0.75))
    assert read_result(store, 7) == result(7, 0.75)


def test_results_are_in_order_replaceable_and_read_once(dict_store: DictStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reader = ResultsReader(dict_store)
    assert reader.read() == []
    for version in (20, 0, 5):
        write_result(dict_store, result(version))
    assert reader.read() == [result(0), result(5), result(20)]
    write_result(dict_store, result(5, 0.75))
    assert reader.read() == [result(0), result(5, 0.75), result(20)]
    monkeypatch.setattr(dict_store, "get", lambda path: pytest.fail(f"{path} was read again"))
    assert reader.read() == [result(0), result(5, 0.75), result(20)]


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"[]", b"null", b'{"policy_version": 3}', b'{"policy_version": "x", "accuracy": 1}']
)
def test_a_damaged_result_is_named_and_counts_as_absent(dict_store: DictStore, data: bytes) -> None:
    dict_store.put(layout.evaluation(3), data)
    write_result(dict_store, result(5))
    assert read_result(dict_store, 3) is None, "it counts as not evaluated"
    reader = ResultsReader(dict_store)
    assert reader.read() == [result(5)]
    [damage] = reader.damaged
    assert damage.file == layout.evaluation(3)
    write_result(dict_store, result(3))
    assert reader.read() == [result(3), result(5)]
    assert reader.damaged == []


def test_a_set_without_accuracy_is_damage(dict_store: DictStore) -> None:
    hard = {"accuracy": 0.25, "prompts": 4}
    write_result(dict_store, {**result(7), "sets": {"hard": hard}})
    stored = read_result(dict_store, 7)
    assert stored is not None
    assert measures_by_set(stored) == {"held_out": stored, "hard": hard}
    write_result(dict_store, {**result(8), "sets": {"hard": {"prompts": 4}}})
    assert read_result(dict_store, 8) is None


def test_the_best_version_is_the_earliest_of_equals_on_the_newest_prompts() -> None:
    other_prompts = {**result(3, 0.9), "prompts": 4}
    results = [result(0, 0.7), other_prompts, result(5, 0.5), result(10, 0.75), result(15, 0.75), result(20, 0.5)]
    assert best_result(results) == result(10, 0.75)
    assert best_result([]) is None
    assert best_result([result(0, 1.0), result(30, 1.0)]) == result(0, 1.0), "the base model counts"


def test_an_unscored_version_is_read_and_never_the_best(dict_store: DictStore) -> None:
    unscored = {**result(30), "accuracy": None}
    write_result(dict_store, unscored)
    assert read_result(dict_store, 30) == unscored
    assert best_result([result(20), unscored]) == result(20)
    assert best_result([unscored]) is None
