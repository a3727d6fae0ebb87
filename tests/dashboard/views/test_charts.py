"""Charts that a page can smooth, move to wall time and make light or dark; a store's text stays text in them."""

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest
from support.pages.run_data import measured, run_data

from dashboard.queries.series import ChartLine, Heat, Track, mean_of_last
from dashboard.views.blocks import MINUTES, VERSIONS
from dashboard.views.display import Display, displayed
from dashboard.views.figures import (
    Series,
    area_chart,
    bar_chart,
    heat_maps,
    line_chart,
    nothing,
    tracks_chart,
)

_MARKUP = '<a href="javascript:alert(1)">x</a> & <b>y</b>'
_ESCAPED = '&lt;a href="javascript:alert(1)"&gt;x&lt;/a&gt; &amp; &lt;b&gt;y&lt;/b&gt;'


def _series(num_points: int, name: str = "one") -> Series:
    return Series(
        name=name, line=ChartLine(np.arange(num_points, dtype=np.float64), np.ones(num_points)), colour="#808080"
    )


def _heat(name: str = "one") -> Heat:
    return Heat(name=name, x=np.array([1.0, 2.0]), y=np.array([0.0]), counts=np.array([[100, 0]]))


def _track(name: str = "generate-0", kind: str = "generate") -> Track:
    return Track(name=name, edges=np.array([0.0, 1.0, 3.0]), shares={kind: np.array([0.25, 0.5])})


_FIGURES: dict[str, Callable[[str], go.Figure]] = {
    "lines": lambda name: line_chart([_series(3, name)], x="x", y="y", empty="-"),
    "areas": lambda name: area_chart([_series(3, name)], x="x", y="y", empty="-"),
    "bars": lambda name: bar_chart([_series(3, name)], x="x", y="y", empty="-"),
    "heat maps": lambda name: heat_maps([_heat(name), _heat()], x="x", y="y", unit="u", empty="-"),
    "tracks": lambda name: tracks_chart([_track(name), _track("b", kind=name)], x="x", y="y", empty="-"),
    "nothing": nothing,
}


@pytest.mark.parametrize("figure", _FIGURES.values(), ids=_FIGURES)
def test_markup_in_a_name_is_shown_as_text(figure: Callable[[str], go.Figure]) -> None:
    made = figure(_MARKUP)
    texts = [trace.name for trace in made.data] + [note.text for note in made.layout.annotations]
    texts += [tick for trace in made.select_yaxes() for tick in trace.ticktext or ()]
    assert _ESCAPED in texts
    assert _MARKUP not in texts


def test_where_no_series_has_a_point_there_is_a_note_in_place_of_the_chart() -> None:
    figure = line_chart([_series(0)], x="x", y="y", empty="No step has finished yet.")
    assert not figure.data
    assert len(figure.layout.annotations) == 1


def test_a_heat_map_shows_logarithms_and_holds_counts() -> None:
    (trace,) = heat_maps([_heat()], x="x", y="y", unit="trajectories", empty="-").data
    assert trace.z[0][0] == 2.0
    # Not a colour for no trajectories: the background.
    assert np.isnan(trace.z[0][1])
    assert trace.customdata.tolist() == [[100, 0]]


ZIGZAG = ChartLine(np.arange(1.0, 7.0), np.array([0.0, 2.0, 0.0, 2.0, 0.0, 2.0]))


def chart(*series: Series, x: str = VERSIONS) -> go.Figure:
    return line_chart(series or [Series(name="reward", line=ZIGZAG, colour="#000")], x=x, y="reward", empty="None.")


def test_a_mean_is_over_the_versions_up_to_its_own_and_of_the_values_that_are_known() -> None:
    line = ChartLine(np.array([1.0, 2.0, 10.0, 11.0]), np.array([1.0, 3.0, np.nan, 5.0]))
    assert mean_of_last(line, 2).y.tolist()[:2] == [1.0, 2.0]
    assert np.isnan(mean_of_last(line, 2).y[2])
    assert mean_of_last(line, 2).y[3] == 5.0
    assert mean_of_last(line, 100).y.tolist() == [1.0, 2.0, 2.0, 3.0]


def test_a_smoothed_line_is_drawn_over_its_faint_values() -> None:
    raw, smooth = displayed(chart(), Display(smoothing=5), []).data
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
        assert displayed(go.Figure(figure), Display(smoothing=10), []) == figure


def test_versions_move_to_the_minutes_at_which_they_were_made_after_smoothing() -> None:
    run = run_data(metrics={"train-0": {"reward_mean": measured([0.0] * 6)}})
    by_version = displayed(chart(), Display(smoothing=5), [run])
    by_time = displayed(chart(), Display(smoothing=5, by_time=True), [run])
    assert by_time.layout.xaxis.title.text == MINUTES
    seconds = by_time.data[1].x * 60 - 60
    np.testing.assert_allclose(seconds, np.arange(-5, 1), atol=1e-6)
    assert by_time.data[1].y.tolist() == by_version.data[1].y.tolist()


def test_an_axis_does_not_show_rounding_as_a_change_and_few_versions_have_whole_ticks() -> None:
    ones = ChartLine(np.arange(1.0, 7.0), 1 + 1e-7 * np.arange(6.0))
    figure = chart(Series(name="sample size", line=ones, colour="#000"))
    assert figure.layout.yaxis.range == pytest.approx((0.98, 1.02), abs=1e-3)
    assert chart().layout.yaxis.range is None
    assert figure.layout.xaxis.dtick == 1
