"""The `evaluations/` folder of a run: written once, read by everyone, damaged files named."""

import os
from pathlib import Path
from typing import Any

import pytest
from support.stores.dict_store import DictStore
from support.stores.faulty_store import Fault, FaultyStore

from millrace.evaluation.results import (
    HELD_OUT,
    ResultsReader,
    as_result,
    best_result,
    comparable,
    measures_by_set,
    read_result,
    write_result,
)
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


def measured(accuracy: float | None, prompts: int = 8) -> dict[str, object]:
    interval = None if accuracy is None else [accuracy - 0.1, accuracy + 0.1]
    return {"accuracy": accuracy, "accuracy_interval": interval, "prompts": prompts, "errors": 1}


def mixed(version: int, math: float | None, words: float | None, /, **weights: float) -> dict[str, Any]:
    """A result of two sources."""
    summary = as_result({"math": {HELD_OUT: measured(math)}, "words": {HELD_OUT: measured(words, 4)}}, weights)
    return {"policy_version": version, "t": 50.0, **summary}


def test_one_source_has_its_held_out_measures_at_the_top_and_further_sets_below() -> None:
    weights = {"default": 1.0}
    assert as_result({"default": {HELD_OUT: measured(0.5)}}, weights) == measured(0.5)
    sets = {HELD_OUT: measured(0.5), "hard": measured(0.25)}
    assert as_result({"default": sets}, weights) == {**measured(0.5), "sets": {"hard": measured(0.25)}}


def test_several_sources_have_their_weighted_mean_at_the_top_and_all_sets_below() -> None:
    by_source = {
        "math": {HELD_OUT: {**measured(0.5), "samples": 2}, "hard": measured(0.25)},
        "words": {HELD_OUT: measured(0.9, 4), "hard": measured(0.75)},
    }
    summary = as_result(by_source, {"math": 3, "words": 1})
    assert summary["sets"] == {
        "math": by_source["math"][HELD_OUT],
        "math/hard": measured(0.25),
        "words": measured(0.9, 4),
        "words/hard": measured(0.75),
    }
    low, high = summary["accuracy_interval"]
    assert (summary["accuracy"], low, high) == pytest.approx((0.6, 0.6 - 0.0790569, 0.6 + 0.0790569))
    assert (summary["prompts"], summary["errors"], summary["weights"]) == (12, 2, {"math": 3, "words": 1})
    assert "samples" not in summary


def test_a_source_without_a_weight_does_not_count(dict_store: DictStore) -> None:
    counted = mixed(5, 0.5, None, math=2)
    assert (counted["accuracy"], counted["prompts"]) == (0.5, 8)
    write_result(dict_store, counted)
    assert read_result(dict_store, 5) == counted


def test_a_source_without_any_score_leaves_all_without_an_accuracy() -> None:
    summary = mixed(5, 0.5, None, math=2, words=1)
    assert (summary["accuracy"], summary["accuracy_interval"], summary["prompts"]) == (None, None, 12)
    assert best_result([mixed(0, 0.2, 0.2, math=2, words=1), summary])["policy_version"] == 0  # type: ignore[index]


def test_the_best_version_is_chosen_by_the_newest_weights() -> None:
    early = [mixed(0, 0.9, 0.1, math=3, words=1), mixed(5, 0.2, 0.8, math=3, words=1)]
    assert best_result(early) == early[0]
    best = best_result([*early, mixed(10, 0.2, 0.7, math=1, words=3)])
    assert best is not None
    assert (best["policy_version"], best["accuracy"]) == (5, pytest.approx(0.65))


def test_versions_from_before_a_source_was_added_can_not_be_compared() -> None:
    alone = {**result(0, 0.9), "prompts": 12}
    without = {**mixed(5, 0.9, 0.9, math=1), "sets": {"math": measured(0.9)}}
    other_prompts = mixed(10, 0.9, 0.9, math=1, words=1)
    other_prompts["sets"] = {"math": measured(0.9, 4), "words": measured(0.9, 8)}
    newest = mixed(15, 0.5, 0.5, math=1, words=1)
    assert comparable([alone, without, other_prompts, newest]) == [newest]


@pytest.mark.parametrize("weights", [{}, {"chess": 1.0}, {"math": 0.0}, {"math": "much"}, 3])
def test_a_result_whose_weights_fit_no_source_is_damage(dict_store: DictStore, weights: object) -> None:
    write_result(dict_store, {**mixed(5, 0.5, 0.5, math=1), "weights": weights})
    assert read_result(dict_store, 5) is None
