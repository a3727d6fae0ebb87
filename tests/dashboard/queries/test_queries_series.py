"""Measurements as lines."""

import numpy as np
from support.pages.run_data import T, run_data

from dashboard.queries.series import Line, averaged, minutes, replicas, thin


def _line(x: list[float], y: list[float]) -> Line:
    return Line(np.array(x, np.float64), np.array(y, np.float64))


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
