"""Figures that a page can make light or dark, and in which a store's text stays text."""

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest

from dashboard.queries.series import Heat, Line, Track
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
    return Series(name=name, line=Line(np.arange(num_points, dtype=np.float64), np.ones(num_points)), colour="#808080")


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
    figure = line_chart([_series(0)], x="x", y="y", empty="No step was finished yet.")
    assert not figure.data
    assert len(figure.layout.annotations) == 1


def test_a_heat_map_shows_logarithms_and_holds_counts() -> None:
    (trace,) = heat_maps([_heat()], x="x", y="y", unit="trajectories", empty="-").data
    assert trace.z[0][0] == 2.0
    # Not a colour for no trajectories: the background.
    assert np.isnan(trace.z[0][1])
    assert trace.customdata.tolist() == [[100, 0]]
