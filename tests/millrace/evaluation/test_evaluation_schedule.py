"""Which checkpoint is evaluated next, and when evaluations end training."""

from typing import Any

import pytest
from support.stores.dict_store import DictStore

from millrace.evaluation.results import HELD_OUT, as_result, write_result
from millrace.evaluation.schedule import due, early_stop, read_early_stop, stop_if_no_better
from storage.checkpoints import Checkpoint


def checkpoint(step: int, incarnation: int = 0) -> Checkpoint:
    return Checkpoint(step=step, files={}, state={}, incarnation=incarnation)


@pytest.mark.parametrize(
    ("steps", "done", "expected"),
    [
        ([], [], []),
        ([0], [], []),
        ([0, 5, 10, 13], [], [10, 5]),
        ([0, 5, 10, 15, 20], [10], [20, 15]),
        ([0, 5, 10, 15, 20], [20], []),
        ([0, 5, 10, 15, 20, 22], [5, 15], [20]),
        ([0, 3, 6, 9, 12], [], []),
    ],
)
def test_multiples_newer_than_any_done_are_due(steps: list[int], done: list[int], expected: list[int]) -> None:
    log = [checkpoint(step) for step in steps]
    checkpoints = due(reversed(log), 5, lambda record: record.step in done)
    assert [item.step for item in checkpoints] == expected


def test_a_rolled_back_version_is_not_due_but_its_replacement_is() -> None:
    log = [checkpoint(5), checkpoint(10), checkpoint(15), checkpoint(5, 1), checkpoint(8, 1), checkpoint(10, 1)]
    checkpoints = due(reversed(log), 5, lambda record: record.step == 5)
    assert [(item.step, item.incarnation) for item in checkpoints] == [(10, 1)]


def results(*accuracies: float, prompts: int = 8) -> list[dict[str, Any]]:
    return [
        {"policy_version": 5 * number, "accuracy": accuracy, "prompts": prompts, "t": 1.0}
        for number, accuracy in enumerate(accuracies)
    ]


@pytest.mark.parametrize(
    ("accuracies", "stop_after", "best"),
    [
        ((), 1, None),
        ((0.5,), 1, None),
        ((0.5, 0.5), 1, 0),
        ((0.5, 0.4), 2, None),
        ((0.5, 0.4, 0.5), 2, 0),
        ((0.1, 0.5, 0.4, 0.3), 2, 5),
        ((0.1, 0.5, 0.4, 0.6), 2, None),
        ((0.1, 0.5, 0.4, 0.6, 0.6, 0.6), 2, 15),
    ],
)
def test_training_ends_after_stop_after_evaluations_without_improvement(
    accuracies: tuple[float, ...], stop_after: int, best: int | None
) -> None:
    stop = early_stop(results(*accuracies), stop_after)
    assert (stop is None) == (best is None)
    assert stop is None or f"of version {best}," in stop.sentence


def test_results_on_other_prompts_do_not_count() -> None:
    assert early_stop([*results(0.9, prompts=4), *results(0.0, 0.5, 0.6)[1:]], 2) is None


def test_sources_are_weighted_alike_in_all_evaluations() -> None:
    def mixed(version: int, weight: float, *accuracies: float) -> dict[str, Any]:
        by_source = {
            name: {HELD_OUT: {"accuracy": accuracy, "accuracy_interval": [0.0, 1.0], "prompts": 8, "errors": 0}}
            for name, accuracy in zip(("math", "words"), accuracies, strict=True)
        }
        return {"policy_version": version, "t": 1.0, **as_result(by_source, {"math": weight, "words": 1})}

    first, second = mixed(0, 9, 0.9, 0.1), mixed(5, 9, 0.5, 0.5)
    assert early_stop([first, second], 1) is not None
    assert early_stop([first, second, mixed(10, 0.1, 0.4, 0.6)], 1) is None
    stop = early_stop([first, second, mixed(10, 0.1, 0.4, 0.4)], 1)
    assert stop is not None
    assert "of version 5," in stop.sentence


def test_the_reason_is_stored_once_per_attempt() -> None:
    store = DictStore()
    for result in results(0.25, 0.5):
        write_result(store, result)
    stop_if_no_better(store, 3, 2)
    assert read_early_stop(store, 3) is None
    for result in results(0.25, 0.5, 0.5, 0.375):
        write_result(store, result)
    stop_if_no_better(store, 3, 2)
    stop = read_early_stop(store, 3)
    assert stop is not None
    assert (stop.policy_version, "0.5000 of version 5" in stop.sentence) == (15, True)
    for result in results(0.25, 0.5, 0.5, 0.375, 0.75, 0.5, 0.5):
        write_result(store, result)
    stop_if_no_better(store, 3, 2)
    assert read_early_stop(store, 3) == stop
    assert read_early_stop(store, 4) is None, "a later attempt decides anew"
