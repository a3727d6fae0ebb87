"""Chart options, applied to finished figures: smoothing, and policy versions or wall time as x axis.

    figure ─► each line: mean of the last versions, over its faint raw values ─► x in minutes ─► page

A line is smoothed before its x is converted, so that both x axes show the same values.
"""

from dataclasses import dataclass

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.phases import clock
from dashboard.queries.series import ChartLine, Floats
from dashboard.read.model import RunData
from dashboard.views.per_run import MINUTES, VERSIONS

SMOOTHINGS = (1, 5, 10, 25, 50, 100)
"""Choices for the number of policy versions to average over."""
_FAINT = 0.28


@dataclass(frozen=True, kw_only=True)
class Display:
    """Options for all charts of a page."""

    smoothing: int = 1
    """Number of policy versions, up to its own, that a point averages; in lines over time, number of points."""
    by_time: bool = False
    """Whether data by policy version is shown over wall time."""


PLAIN = Display()


def displayed(figure: go.Figure, display: Display, run: RunData | None) -> go.Figure:
    """Applies the options; `run` is None for several runs, which stay over versions."""
    if display.smoothing > 1:
        _smooth(figure, display.smoothing)
    if display.by_time and run is not None and _is_over_versions(figure):
        _move(figure, clock(run))
    return figure


def mean_of_last(line: ChartLine, width: float) -> ChartLine:
    """Returns at each x the mean of the finite values in (x - width, x]; NaN without any."""
    finite = np.isfinite(line.y)
    sums = np.cumsum(np.append(0.0, np.where(finite, line.y, 0.0)))
    counts = np.cumsum(np.append(0, finite))
    starts = np.searchsorted(line.x, line.x - width, side="right")
    ends = np.arange(1, len(line.x) + 1)
    number = counts[ends] - counts[starts]
    y = np.divide(sums[ends] - sums[starts], number, out=np.full(len(line.x), np.nan), where=number > 0)
    return ChartLine(line.x, y)


def _smooth(figure: go.Figure, smoothing: int) -> None:
    over_versions = _is_over_versions(figure)
    traces = []
    for trace in figure.data:
        if not _is_line(trace):
            traces.append(trace)
            continue
        x, y = np.asarray(trace.x, np.float64), np.asarray(trace.y, np.float64)
        if over_versions:
            smooth = mean_of_last(ChartLine(x, y), smoothing)
        else:
            smooth = ChartLine(x, mean_of_last(ChartLine(np.arange(len(x), dtype=np.float64), y), smoothing).y)
        raw = trace.to_plotly_json()
        behind = {"opacity": _FAINT, "showlegend": False, "hoverinfo": "skip", "legendgroup": trace.name}
        traces.append({**raw, **behind})
        traces.append({**raw, "y": smooth.y, "mode": "lines", "legendgroup": trace.name})
    figure.data = ()
    figure.add_traces(traces)


def _is_line(trace: go.Figure) -> bool:
    """Whether it is a line between measured points, not an area, a band or a stepped line such as a bound."""
    return (
        trace.type == "scatter"
        and "lines" in (trace.mode or "")
        and trace.stackgroup is None
        and trace.fill is None
        and trace.line.shape != "hv"
        and trace.x is not None
        and len(trace.x) > 1
    )


def _is_over_versions(figure: go.Figure) -> bool:
    return figure.layout.xaxis.title.text == VERSIONS and all(trace.type == "scatter" for trace in figure.data)


def _move(figure: go.Figure, at: ChartLine) -> None:
    if len(at.x) == 0:
        return

    def moved(x: object) -> Floats:
        minutes: Floats = np.interp(np.asarray(x, np.float64), at.x, at.y)
        return minutes

    for trace in figure.data:
        trace.x = moved(trace.x)
    figure.update_xaxes(title={"text": MINUTES}, dtick=None)
