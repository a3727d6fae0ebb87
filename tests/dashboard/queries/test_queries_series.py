"""Measurements as lines."""

import numpy as np
from support.pages.run_data import T, measured, run_data

from dashboard.queries.series import Line, averaged, minutes, over_versions, replicas, thin


def _line(x: list[float], y: list[float]) -> Line:
    return Line(np.array(x, np.float64), np.array(y, np.float64))


def test_a_line_of_500_points_is_left_as_it_is() -> None:
    line = _line(list(range(500)), [1.0] * 500)
    assert thin(line) is line


def test_more_points_become_the_means_of_neighbours_and_the_last_one_may_be_of_fewer() -> None:
    line = thin(_line(list(range(1001)), [float(value % 3) for value in range(1001)]))
    assert len(line.x) == 334
    assert line.x[:2].tolist() == [1.0, 4.0]
    assert line.y[:2].tolist() == [1.0, 1.0]
    # Point 999 and 1000, of values 0 and 1.
    assert (line.x[-1], line.y[-1]) == (999.5, 0.5)


def test_of_a_maximum_neighbours_keep_the_largest() -> None:
    line = thin(_line(list(range(1000)), [9.0 if value == 1 else 1.0 for value in range(1000)]), largest=True)
    assert line.y[:2].tolist() == [9.0, 1.0]


def test_lines_are_averaged_where_any_has_a_point() -> None:
    line = averaged([_line([1, 2], [10, 20]), _line([2, 3], [40, 50])])
    assert line.x.tolist() == [1, 2, 3]
    assert line.y.tolist() == [10, 30, 50]


def test_no_lines_average_to_none() -> None:
    assert len(averaged([]).x) == 0


def test_what_was_never_measured_is_an_empty_line() -> None:
    assert len(over_versions(run_data(), "train-0", "never").x) == 0
    assert len(over_versions(run_data(), "generate-7", "never").x) == 0


def test_versions_that_come_again_are_put_in_order() -> None:
    rows = {**measured([1.0, 2.0, 3.0]), "policy_version": np.array([5, 6, 5])}
    line = over_versions(run_data(metrics={"sync_weights-0": {"push_seconds": rows}}), "sync_weights-0", "push_seconds")
    assert line.x.tolist() == [5, 5, 6]
    assert line.y.tolist() == [1, 3, 2]


def test_replicas_are_ordered_by_number() -> None:
    run = run_data(metrics={"generate-10": {}, "generate-9": {}, "score-0": {}})
    assert replicas(run, "generate") == ["generate-9", "generate-10"]


def test_time_is_counted_in_minutes_from_the_first_attempt() -> None:
    # The run of the fixture was started a minute before T.
    assert minutes(run_data(), np.array([T - 60, T, T + 30])).tolist() == [0.0, 1.0, 1.5]
