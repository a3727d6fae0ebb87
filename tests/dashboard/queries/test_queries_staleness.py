"""Staleness, from the rows that say what became of each trajectory."""

from typing import Any

import numpy as np
import pytest
from support.pages.run_data import consumed_rows, measured, run_data

from dashboard.queries import staleness
from dashboard.read.model import RunData

_EMPTY = run_data(consumed=consumed_rows([]))


def _run(policy_version: Any, **columns: Any) -> RunData:
    return run_data(consumed=consumed_rows(policy_version, **columns))


def test_mean_and_largest_are_of_the_groups_of_each_step() -> None:
    values = {"staleness_mean": measured([0.0, 1.5]), "staleness_max": measured([0.0, 3.0])}
    mean, largest = staleness.over_time(run_data(metrics={"train-0": values}))
    assert (mean.x.tolist(), mean.y.tolist()) == ([1, 2], [0.0, 1.5])
    assert (largest.x.tolist(), largest.y.tolist()) == ([1, 2], [0.0, 3.0])


def test_the_bound_is_the_one_that_was_measured_at_each_step() -> None:
    rows = {"policy_version": np.array([1, 2, 3]), "value": np.array([1.0, 3.0, 2.0])}
    bound = staleness.bound(run_data(metrics={"train-0": {"max_staleness": rows}}))
    assert bound.x.tolist() == [1, 2, 3]
    assert bound.y.tolist() == [1, 3, 2]


def test_in_flight_and_in_queues_add_up_to_the_mean() -> None:
    in_flight, in_queues = staleness.split(_run([1, 1, 2], staleness=[3, 1, 2], staleness_in_flight=[1, 0, 2]))
    assert in_flight.y.tolist() == [0.5, 2.0]
    assert in_queues.y.tolist() == [1.5, 0.0]


def test_the_distribution_now_is_of_the_newest_tenth() -> None:
    # 40 steps of one row: the newest tenth is the last four.
    lags = [0] * 36 + [1, 1, 2, 2]
    distribution = staleness.distribution(_run(np.arange(1, 41), staleness=lags))
    assert distribution is not None
    recent, whole = distribution
    assert recent.x.tolist() == [0, 1, 2]
    assert recent.y.tolist() == [0.0, 0.5, 0.5]
    assert whole.y.tolist() == [0.9, 0.05, 0.05]


def test_pairs_count_trajectories_by_their_staleness_and_when_they_were_trained() -> None:
    pairs = staleness.pairs(_run([3, 3, 4, 5], staleness=[2, 0, 1, 0], outcome=[0, 0, 0, 0]))
    assert pairs is not None
    assert pairs.x.tolist() == [3, 4, 5]
    assert pairs.y.tolist() == [0, 1, 2]
    assert pairs.counts.tolist() == [[1, 0, 1], [0, 1, 0], [1, 0, 0]]


def test_spans_are_shares_by_how_many_versions_sampled_and_five_stands_for_more() -> None:
    run = _run([9, 9, 9, 9], min_policy_version=[8, 7, 1, 4], max_policy_version=[8, 8, 8, 8])
    assert {number: line.y.tolist() for number, line in staleness.spans(run).items()} == {
        1: [0.25], 2: [0.25], 3: [0.0], 4: [0.0], 5: [0.5],
    }  # fmt: skip
    assert staleness.mean_span(run).y.tolist() == [(1 + 2 + 8 + 5) / 4]


def test_outcomes_show_whether_drops_favour_short_responses() -> None:
    run = _run([1, 1, 1, 1], outcome=[0, 0, 1, 1], tokens=[10, 20, 40, 20], reward=[1.0, 0.0, np.nan, 0.5])
    assert staleness.outcomes(run) == {"trained": (2, 30, 15.0, 0.5), "stale": (2, 60, 30.0, 0.5)}


def test_before_the_first_step_there_is_nothing_to_count() -> None:
    dropped_only = _run([1, 1], outcome=[1, 1])
    for run in (_EMPTY, dropped_only):
        assert staleness.distribution(run) is staleness.pairs(run) is None
        assert staleness.by_generator(run) == staleness.spans(run) == {}
        assert len(staleness.mean_span(run).x) == 0


def test_tokens_are_counted_by_their_own_staleness() -> None:
    def counted(versions: list[int], tokens: list[float]) -> dict[str, Any]:
        return {"policy_version": np.array(versions), "value": np.array(tokens)}

    metrics = {
        "trained_tokens_of_staleness/0": counted(list(range(1, 21)), [10.0] * 20),
        "trained_tokens_of_staleness/2": counted([18, 19, 20], [100.0, 10.0, 30.0]),
        "staleness_mean": counted([1], [9.0]),
    }
    token_distribution = staleness.token_distribution(run_data(metrics={"train-0": metrics}))
    assert token_distribution is not None
    recent, whole = token_distribution
    assert recent.x.tolist() == whole.x.tolist() == [0, 1, 2]
    assert recent.y == pytest.approx([1 / 3, 0, 2 / 3])
    assert whole.y == pytest.approx([200 / 340, 0, 140 / 340])
    assert staleness.token_distribution(run_data()) is None
