"""When evaluations end training."""

from typing import Any

import pytest
from support.stores.dict_store import DictStore

from millrace.evaluation.early_stop import early_stop, read_early_stop, stop_if_no_better
from millrace.evaluation.results import write_result


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
def test_training_ends_after_so_many_evaluations_without_a_better_one(
    accuracies: tuple[float, ...], stop_after: int, best: int | None
) -> None:
    stop = early_stop(results(*accuracies), stop_after)
    assert (None if stop is None else stop.best_version) == best


def test_results_on_other_prompts_do_not_count() -> None:
    assert early_stop([*results(0.9, prompts=4), *results(0.0, 0.5, 0.6)[1:]], 2) is None


def test_the_reason_is_stored_once_and_read_by_the_trainer_of_that_attempt() -> None:
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
    assert (stop.policy_version, stop.best_version, stop.best_accuracy) == (15, 5, 0.5)
    assert stop.sentence == (
        "2 evaluations up to version 15 were not better than the 0.5000 of version 5, and evaluation.stop_after is 2"
    )
    for result in results(0.25, 0.5, 0.5, 0.375, 0.75, 0.5, 0.5):
        write_result(store, result)
    stop_if_no_better(store, 3, 2)
    assert read_early_stop(store, 3) == stop
    assert read_early_stop(store, 4) is None, "a later attempt decides anew"
