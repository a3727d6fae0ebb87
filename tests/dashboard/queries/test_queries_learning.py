"""Lines of learning: the trainer's metrics, rewards and lengths, and how lines are thinned and averaged."""

import numpy as np
import pytest
from support.pages.run_data import T, consumed_rows, measured, run_data

from dashboard.queries import series
from dashboard.queries.series import ChartLine, averaged, minutes, replicas, thin
from dashboard.read.model import RunData
from dashboard.views import rewards


def test_a_measurement_is_over_policy_versions() -> None:
    line = series.measured(run_data(), "loss")
    assert line.x.tolist() == [1, 2, 3]
    assert line.y.tolist() == [0.5, 0.25, -0.125]


def test_accuracy_is_over_the_versions_that_were_evaluated() -> None:
    line = series.accuracy(run_data())
    assert line.x.tolist() == [0, 2]
    assert line.y.tolist() == [0.25, 0.5]
    low, high = series.accuracy_interval(run_data())
    assert (low.y[0], high.y[0]) == (0.125, 0.5)
    hard = {**run_data().evaluations, "accuracy": np.array([0.0, 0.125])}
    further = series.further_accuracies(run_data(evaluation_sets={"hard": hard}))
    assert {name: line.y.tolist() for name, line in further.items()} == {"hard": [0.0, 0.125]}


def two_groups(**columns: object) -> RunData:
    """Version 1 took a group of four and one of two; version 3 a group whose rewards are all equal."""
    values = {
        "sample_index": [0, 1, 2, 3, 0, 1, 0, 1],
        "reward": [0.0, 1.0, 0.0, 1.0, 2.0, 0.0, 0.1, 0.1],
        **columns,
    }
    return run_data(consumed=consumed_rows([1] * 6 + [3, 3], **values))  # type: ignore[arg-type]


def test_the_spread_is_that_of_the_rewards_within_each_group() -> None:
    reward_spread = rewards.reward_spread(two_groups())
    assert reward_spread["mean"].x.tolist() == [1, 3]
    assert reward_spread["mean"].y == pytest.approx([0.75, 0.0])
    assert {name: line.y.tolist() for name, line in reward_spread.items() if name != "mean"} == {
        "p10": [0.5, 0.0], "p50": [0.5, 0.0], "p90": [1.0, 0.0]
    }  # fmt: skip


def test_a_failed_reward_does_not_count_and_one_reward_has_no_spread() -> None:
    unknown = [np.nan, 1.0, np.nan, 0.0, 2.0, np.nan, 0.1, 0.1]
    reward_spread = rewards.reward_spread(two_groups(reward=unknown))
    assert reward_spread["p90"].y.tolist() == [0.5, 0.0]


def test_lengths_are_quantiles_over_all_responses_of_a_version() -> None:
    run = run_data(consumed=consumed_rows([1] * 100 + [2], tokens=[*range(100, 0, -1), 7]))
    lengths = rewards.lengths(run)
    assert {name: line.y.tolist() for name, line in lengths.items()} == {
        "p10": [10, 7], "p50": [50, 7], "p90": [90, 7], "p99": [99, 7], "max": [100, 7]
    }  # fmt: skip


def test_components_are_those_that_the_trainer_measured() -> None:
    metrics = {
        "train-0": {
            "reward_component/b": measured([1.0]),
            "reward_component/a": measured([0.5]),
            "loss": measured([2.0]),
        }
    }
    components = rewards.components(run_data(metrics=metrics))
    assert [(name, line.y.tolist()) for name, line in components.items()] == [("a", [0.5]), ("b", [1.0])]
    assert len(series.measured(run_data(metrics=metrics), "truncated_share").x) == 0


def _line(x: list[float], y: list[float]) -> ChartLine:
    return ChartLine(np.array(x, np.float64), np.array(y, np.float64))


def test_of_many_points_neighbours_become_their_mean_or_their_largest() -> None:
    line = _line(list(range(1000)), [9.0 if value == 1 else 1.0 for value in range(1000)])
    assert len(thin(line).x) <= 500
    assert thin(line).y[:2].tolist() == [5.0, 1.0]
    assert thin(line, largest=True).y[:2].tolist() == [9.0, 1.0]
    few = _line([1, 2], [10, 20])
    assert thin(few) is few


def test_lines_are_averaged_where_any_has_a_point() -> None:
    line = averaged([_line([1, 2], [10, 20]), _line([2, 3], [40, 50])])
    assert line.x.tolist() == [1, 2, 3]
    assert line.y.tolist() == [10, 30, 50]


def test_replicas_are_ordered_by_number() -> None:
    run = run_data(metrics={"generate-10": {}, "generate-9": {}, "score-0": {}})
    assert replicas(run, "generate") == ["generate-9", "generate-10"]


def test_time_is_counted_in_minutes_from_the_first_attempt() -> None:
    # The run of the fixture was started a minute before T.
    assert minutes(run_data(), np.array([T - 60, T, T + 30])).tolist() == [0.0, 1.0, 1.5]
