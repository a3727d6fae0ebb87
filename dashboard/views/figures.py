"""Plotly figures from arrays: lines, areas, bars, heat maps, tracks. This module is independent of runs.

Backgrounds are transparent and only data has colours, so that the page's style can make figures light or dark.
`uirevision` never changes, so a zoom survives new data. Names may come from a store, and Plotly interprets markup in
them, so they are escaped.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.series import ChartLine, Floats, Heat, Track
from dashboard.views.colours import GREEN, SCALE, colour_of

PLOTLY_FILE = Path(__file__).parent / "plotly-cartesian.min.js"
"""plotly.js without maps and 3D, in the version of the package plotly: a third of the bytes."""
FAMILY = 'Inter, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
"""The type family of the page's style."""
_LEAST_SPAN = 0.02
"""Smallest span of a y axis, as a share of its values: rounding is not drawn as a change."""
_FEW_VERSIONS = 12
MOST_ROWS = 4
"""Rows of a box that shows the values under the cursor."""
_DOTS = 30
"""Lines with at most this many points get markers, which also show single points."""
_TRACK_PIXELS, _TRACKS_MARGIN = 42, 120
_TRACK_GAP = 0.18
"""Gap between two tracks, as a share of a track's height."""


@dataclass(frozen=True, kw_only=True)
class Series:
    """One line, area or set of bars of a chart."""

    name: str
    """Name in the legend; plain text."""
    line: ChartLine
    """NaN leaves a gap."""
    colour: str
    dash: str = "solid"
    """solid, dash or dot."""
    stepped: bool = False
    """Draw each value until the next point."""
    dots_only: bool = False
    interval: tuple[ChartLine, ChartLine] | None = None
    """The lower and upper ends of the uncertainty around the line, drawn as a band."""
    interval_opacity: float = 0.18
    """Opacity of the band; small for many overlapping bands."""


def nothing(sentence: str) -> go.Figure:
    """Draws one sentence that explains why the chart is empty."""
    figure = _figure([])
    figure.add_annotation(text=plain(sentence), showarrow=False, xref="paper", yref="paper", x=0.5, y=0.5)
    return figure.update_xaxes(visible=False).update_yaxes(visible=False)


def line_chart(
    series: Sequence[Series],
    *,
    x: str,
    y: str,
    empty: str,
    from_zero: bool = False,
    logarithmic: bool = False,
    legend: bool = True,
    band: tuple[float, float] | None = None,
    whole: float | None = None,
) -> go.Figure:
    """Draws lines; `x` and `y` are axis titles with units, `empty` is shown if no series has points.

    `band`: lowest and highest desired y. `whole`: the top of an axis from zero, if known.
    """
    drawn = [entry for entry in series if len(entry.line.x)]
    if not drawn:
        return nothing(empty)
    bands = [_interval(entry) for entry in drawn if entry.interval is not None]
    figure = _figure([*bands, *(_scatter(entry) for entry in drawn)], x=x, y=y)
    figure.update_layout(showlegend=legend)
    if from_zero:
        figure.update_yaxes(range=None if whole is None else [0, whole], rangemode="tozero")
    elif not logarithmic:
        figure.update_yaxes(range=_least_range(drawn))
    if logarithmic:
        positive = _values(drawn)[_values(drawn) > 0]
        has_decades = len(positive) and positive.max() > 100 * positive.min()
        figure.update_yaxes(type="log", dtick=1 if has_decades else None)
    if band is not None:
        figure.add_hrect(y0=band[0], y1=band[1], fillcolor=GREEN, opacity=0.15, line_width=0, layer="below")
    return figure


def _least_range(series: Sequence[Series]) -> list[float] | None:
    """Returns the range of a y axis with almost equal values; None for Plotly's own."""
    values = _values(series)
    if not len(values) or any(entry.interval is not None for entry in series):
        return None
    low, high, margin = values.min(), values.max(), _LEAST_SPAN * abs(float(values.mean()))
    return None if high - low >= margin else [float(low) - margin, float(high) + margin]


def area_chart(series: Sequence[Series], *, x: str, y: str, empty: str, whole: float | None = None) -> go.Figure:
    """Draws stacked areas in the order of `series`, which share their x; `whole` is the top of the axis, if known."""
    drawn = [entry for entry in series if len(entry.line.x)]
    if not drawn:
        return nothing(empty)
    traces = [
        _scatter(entry) | {"stackgroup": "one", "mode": "lines", "line": {"width": 0}, "fillcolor": entry.colour}
        for entry in drawn
    ]
    figure = _figure(traces, x=x, y=y)
    figure.update_yaxes(range=None if whole is None else [0, whole], rangemode="tozero")
    return figure


def bar_chart(series: Sequence[Series], *, x: str, y: str, empty: str) -> go.Figure:
    """Draws bars side by side at integer x."""
    drawn = [entry for entry in series if len(entry.line.x)]
    if not drawn:
        return nothing(empty)
    traces = [
        {"type": "bar", "name": plain(entry.name), **entry.line._asdict(), "marker": {"color": entry.colour}}
        for entry in drawn
    ]
    return _figure(traces, x=x, y=y)


def heat_maps(heats: Sequence[Heat], *, x: str, y: str, unit: str, empty: str) -> go.Figure:
    """Draws heat maps side by side with one logarithmic colour scale; `unit` is the unit of the counts."""
    drawn = [heat for heat in heats if heat.counts.size]
    if not drawn:
        return nothing(empty)
    figure = _figure([], x=x, y=y)
    figure.update_layout(hovermode="closest", coloraxis=_counted_colours(drawn, unit))
    for number, heat in enumerate(drawn):
        suffix = "" if number == 0 else str(number + 1)
        left, right = number / len(drawn), (number + 0.88) / len(drawn)
        figure.update_layout(
            {
                f"xaxis{suffix}": {"title": {"text": x}, "domain": [left, right], "anchor": f"y{suffix}"},
                f"yaxis{suffix}": {"title": {"text": y if number == 0 else ""}, "anchor": f"x{suffix}"},
            }
        )
        figure.add_trace(_heat_map(heat, suffix, x, y, unit))
        if len(drawn) > 1:
            figure.add_annotation(
                text=plain(heat.name), showarrow=False, xref="paper", yref="paper", x=left, y=1.08, xanchor="left"
            )
    return figure.update_xaxes(zeroline=False).update_yaxes(zeroline=False)


def tracks_chart(tracks: Sequence[Track], *, x: str, y: str, empty: str) -> go.Figure:
    """Draws one row per track over a common x axis, with each interval divided by kind."""
    drawn = [track for track in tracks if track.shares]
    if not drawn:
        return nothing(empty)
    figure = _figure([], x=x)
    most = max(len(track.shares) for track in drawn)
    hovermode = "x unified" if most <= MOST_ROWS else "closest"
    figure.update_layout(height=_TRACKS_MARGIN + _TRACK_PIXELS * len(drawn), margin={"t": 56}, hovermode=hovermode)
    figure.update_xaxes(anchor=f"y{len(drawn)}" if len(drawn) > 1 else "y")
    named: set[str] = set()
    longest = max(drawn, key=lambda track: len(track.name))
    for number, track in enumerate(drawn):
        suffix = "" if number == 0 else str(number + 1)
        top = 1 - number / len(drawn)
        axis = {
            "domain": [top - (1 - _TRACK_GAP) / len(drawn), top],
            "range": [0, 1],
            "fixedrange": True,
            "tickvals": [0.5],
            "ticktext": [plain(track.name)],
            "showgrid": False,
            "zeroline": False,
            "automargin": True,
            # Next to the longest name, so that the title overlaps no name.
            "title": {"text": y if track is longest else "", "standoff": 8},
        }
        figure.update_layout({f"yaxis{suffix}": axis})
        figure.add_traces([_band(track, kind, f"y{suffix}", kind not in named) for kind in track.shares])
        named.update(track.shares)
    return figure


def _figure(traces: Sequence[Mapping[str, Any]], x: str = "", y: str = "") -> go.Figure:
    num_rows = sum(trace.get("hoverinfo") != "skip" for trace in traces)
    layout = {
        "template": "none",
        "paper_bgcolor": "rgba(0,0,0,0)",
        "plot_bgcolor": "rgba(0,0,0,0)",
        "uirevision": "kept",
        "font": {"family": FAMILY, "size": 12},
        # A box next to the cursor has a row for each line; with many lines, only the row of the nearest line.
        "hovermode": "x unified" if num_rows <= MOST_ROWS else "closest",
        "margin": {"l": 64, "r": 16, "t": 32, "b": 48},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom", "bgcolor": "rgba(0,0,0,0)"},
        "showlegend": True,
        "xaxis": {"title": {"text": x}, "automargin": True, "zeroline": False, "dtick": _whole_ticks(traces)},
        "yaxis": {"title": {"text": y}, "automargin": True, "zeroline": False, "hoverformat": ",.3~r"},
    }
    return go.Figure(data=list(traces), layout=layout)


def _whole_ticks(traces: Sequence[Mapping[str, Any]]) -> int | None:
    """Returns a distance of one between ticks of few whole numbers, such as versions."""
    values = np.concatenate([np.asarray(trace["x"], np.float64) for trace in traces] or [np.empty(0)])
    values = values[np.isfinite(values)]
    few = len(values) and values.max() - values.min() <= _FEW_VERSIONS and not (values % 1).any()
    return 1 if few else None


def _scatter(series: Series) -> dict[str, Any]:
    dotted = series.dots_only or (len(series.line.x) <= _DOTS and not series.stepped)
    return {
        "type": "scatter",
        "name": plain(series.name),
        # A click in the legend hides the line with its band.
        "legendgroup": plain(series.name),
        **series.line._asdict(),
        "mode": "markers" if series.dots_only else "lines+markers" if dotted else "lines",
        "line": {
            "color": series.colour,
            "dash": series.dash,
            "shape": "hv" if series.stepped else "linear",
            "width": 2,
        },
        "marker": {"color": series.colour, "size": 8 if series.dots_only else 5},
    }


def _interval(series: Series) -> dict[str, Any]:
    assert series.interval is not None
    low, high = (ChartLine(*(values[np.isfinite(line.y)] for values in line)) for line in series.interval)
    return {
        "type": "scatter",
        "legendgroup": plain(series.name),
        "x": np.concatenate([high.x, low.x[::-1]]),
        "y": np.concatenate([high.y, low.y[::-1]]),
        "fill": "toself",
        "fillcolor": series.colour,
        "opacity": series.interval_opacity,
        "line": {"width": 0},
        "mode": "lines",
        "hoverinfo": "skip",
        "showlegend": False,
    }


def _band(track: Track, kind: str, y_axis: str, in_legend: bool) -> dict[str, Any]:
    shares = track.shares[kind]
    return {
        "type": "scatter",
        "name": plain(kind),
        "x": track.edges,
        # The last interval ends at the last edge.
        "y": np.append(shares, shares[-1:]),
        "yaxis": y_axis,
        "stackgroup": "one",
        "mode": "lines",
        "line": {"width": 0, "shape": "hv"},
        "fillcolor": colour_of(kind),
        "legendgroup": plain(kind),
        "showlegend": in_legend,
        "hovertemplate": "%{y:.0%}",
    }


def _heat_map(heat: Heat, suffix: str, x: str, y: str, unit: str) -> dict[str, Any]:
    with np.errstate(divide="ignore"):
        logarithms = np.log10(heat.counts)
    return {
        "type": "heatmap",
        "x": heat.x,
        "y": heat.y,
        "z": np.where(heat.counts > 0, logarithms, np.nan).astype(np.float32),
        "customdata": heat.counts.astype(np.int32),
        "xaxis": f"x{suffix}",
        "yaxis": f"y{suffix}",
        "coloraxis": "coloraxis",
        "hovertemplate": f"{x} %{{x}}<br>{y} %{{y}}<br>%{{customdata:,}} {unit}<extra></extra>",
    }


def _counted_colours(heats: Sequence[Heat], unit: str) -> dict[str, Any]:
    """Returns a logarithmic colour axis with counts as ticks."""
    most = max(int(heat.counts.max()) for heat in heats)
    powers = range(len(str(most)))
    bar = {"title": {"text": unit}, "tickvals": list(powers), "ticktext": [f"{10**power:,}" for power in powers]}
    colours = {"colorscale": [list(stop) for stop in SCALE], "cmin": 0, "cmax": max(1.0, float(np.log10(most)))}
    return {**colours, "colorbar": {**bar, "outlinewidth": 0}}


def _values(series: Sequence[Series]) -> Floats:
    every = np.concatenate([entry.line.y for entry in series])
    values: Floats = every[np.isfinite(every)]
    return values


def plain(text: str) -> str:
    """Escapes text that may come from a store, because Plotly interprets markup."""
    return escape(text, quote=False)
