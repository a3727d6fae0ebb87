"""Charts smoothed and moved to wall time, as the reader chooses."""

import numpy as np
import plotly.graph_objects as go
from support.pages.run_data import measured, run_data

from dashboard.queries.series import Line
from dashboard.views.display import Display, displayed, mean_of_last
from dashboard.views.figures import Series, area_chart, line_chart
from dashboard.views.per_run import MINUTES, VERSIONS

ZIGZAG = Line(np.arange(1.0, 7.0), np.array([0.0, 2.0, 0.0, 2.0, 0.0, 2.0]))


def chart(*series: Series, x: str = VERSIONS) -> go.Figure:
    return line_chart(series or [Series(name="reward", line=ZIGZAG, colour="#000")], x=x, y="reward", empty="None.")


def test_a_mean_is_over_the_versions_up_to_its_own_and_of_the_values_that_are_known() -> None:
    line = Line(np.array([1.0, 2.0, 10.0, 11.0]), np.array([1.0, 3.0, np.nan, 5.0]))
    assert mean_of_last(line, 2).y.tolist()[:2] == [1.0, 2.0]
    assert np.isnan(mean_of_last(line, 2).y[2])
    assert mean_of_last(line, 2).y[3] == 5.0
    assert mean_of_last(line, 100).y.tolist() == [1.0, 2.0, 2.0, 3.0]


def test_a_smoothed_line_is_drawn_over_its_faint_values() -> None:
    raw, smooth = displayed(chart(), Display(smoothing=5), None).data
    assert (raw.y.tolist(), raw.opacity < 0.5, raw.showlegend) == (ZIGZAG.y.tolist(), True, False)
    assert (smooth.name, smooth.opacity, smooth.showlegend) == ("reward", None, None)
    assert smooth.y.tolist()[1:3] == [1.0, 2 / 3]
    assert raw.legendgroup == smooth.legendgroup == "reward"


def test_bounds_single_results_and_areas_are_not_smoothed() -> None:
    line = {"line": ZIGZAG, "colour": "#000"}
    for figure in (
        chart(Series(name="bound", stepped=True, **line), Series(name="accuracy", dots_only=True, **line)),
        area_chart([Series(name="work", **line)], x=VERSIONS, y="s", empty="None."),
    ):
        assert displayed(go.Figure(figure), Display(smoothing=10), None) == figure


def test_versions_move_to_the_minutes_at_which_they_were_made_after_smoothing() -> None:
    run = run_data(metrics={"train-0": {"reward_mean": measured([0.0] * 6)}})
    by_version = displayed(chart(), Display(smoothing=5), run)
    by_time = displayed(chart(), Display(smoothing=5, by_time=True), run)
    assert by_time.layout.xaxis.title.text == MINUTES
    seconds = by_time.data[1].x * 60 - 60
    np.testing.assert_allclose(seconds, np.arange(-5, 1), atol=1e-6)
    assert by_time.data[1].y.tolist() == by_version.data[1].y.tolist()
