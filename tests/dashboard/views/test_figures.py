"""Figures that a page can make light or dark, and in which a store's text stays text."""

from collections.abc import Callable

import numpy as np
import plotly.graph_objects as go
import pytest

from dashboard.queries.series import Heat, Line, Track
from dashboard.views.colours import MEANINGS, SEQUENCE
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


@pytest.mark.parametrize("figure", _FIGURES.values(), ids=_FIGURES)
def test_nothing_but_data_has_a_colour_and_a_zoom_survives(figure: Callable[[str], go.Figure]) -> None:
    layout = figure("a").layout
    assert layout.paper_bgcolor == layout.plot_bgcolor == "rgba(0,0,0,0)"
    assert layout.font.color is None
    axes = [*figure("a").select_xaxes(), *figure("a").select_yaxes()]
    assert {(axis.gridcolor, axis.color, axis.title.font.color) for axis in axes} == {(None, None, None)}
    assert layout.uirevision == "kept"


@pytest.mark.parametrize("colour", sorted({*MEANINGS.values(), *SEQUENCE}))
def test_every_data_colour_stands_out_from_white_and_from_near_black(colour: str) -> None:
    of = _luminance(colour)
    assert 1.05 / (of + 0.05) >= 3, "on white"
    assert (of + 0.05) / (_luminance("#111111") + 0.05) >= 3, "on #111"


def test_where_no_series_has_a_point_one_sentence_says_why() -> None:
    figure = line_chart([_series(0)], x="x", y="y", empty="No step was finished yet.")
    assert not figure.data
    assert [note.text for note in figure.layout.annotations] == ["No step was finished yet."]


def test_few_points_are_marked_one_by_one() -> None:
    assert line_chart([_series(30)], x="x", y="y", empty="-").data[0].mode == "lines+markers"
    assert line_chart([_series(31)], x="x", y="y", empty="-").data[0].mode == "lines"


def test_a_heat_map_shows_logarithms_and_tells_counts() -> None:
    figure = heat_maps([_heat()], x="x", y="y", unit="trajectories", empty="-")
    (trace,) = figure.data
    assert trace.z[0][0] == 2.0
    # Not a colour for no trajectories: the background.
    assert np.isnan(trace.z[0][1])
    assert trace.customdata.tolist() == [[100, 0]]
    assert figure.layout.coloraxis.colorbar.ticktext == ("1", "10", "100")
    assert (figure.layout.coloraxis.cmin, figure.layout.coloraxis.cmax) == (0, 2)


def test_the_last_interval_of_a_track_lasts_until_its_last_edge() -> None:
    (trace,) = tracks_chart([_track()], x="x", y="y", empty="-").data
    assert trace.x.tolist() == [0, 1, 3]
    assert trace.y.tolist() == [0.25, 0.5, 0.5]
    assert trace.line.shape == "hv"


def test_a_kind_is_named_once_however_many_tracks_have_it() -> None:
    figure = tracks_chart([_track(), _track("generate-1")], x="x", y="y", empty="-")
    assert [trace.showlegend for trace in figure.data] == [True, False]
    assert len({trace.yaxis for trace in figure.data}) == 2


def _luminance(colour: str) -> float:
    """Relative luminance as WCAG 2 defines it."""
    parts = (int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5))
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue
