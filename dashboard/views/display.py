"""Chart options, applied to finished figures: smoothing, and policy versions or wall time as x axis.

    figure ─► each line: mean of the last versions, over its faint raw values ─► x in minutes ─► page

A line is smoothed before its x is converted, so that both x axes show the same values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.series import ChartLine, clock, mean_of_last
from dashboard.read.model import RunData
from dashboard.views.figures import plain
from dashboard.views.per_run import MINUTES, VERSIONS
from millrace.control.collapse import STEPS

SMOOTHINGS = (1, 5, 10, 25, 50, 100)
"""Choices for the number of policy versions to average over."""
_FAINT = 0.28


@dataclass(frozen=True, kw_only=True)
class Display:
    """Options of a page, from its address."""

    smoothing: int = STEPS
    """Number of policy versions, up to its own, that a point averages; in lines over time, number of points."""
    by_time: bool = False
    """Whether data by policy version is shown over wall time."""
    before: int | None = None
    """Policy version to compare an evaluation with; None: the first evaluated."""
    after: int | None = None
    """Policy version of that evaluation; None: the newest evaluated."""


DEFAULT = Display()


def displayed(figure: go.Figure, display: Display, runs: Sequence[RunData]) -> go.Figure:
    """Applies the options to a figure of `runs`."""
    if display.smoothing > 1:
        _smooth(figure, display.smoothing)
    if display.by_time and _is_over_versions(figure):
        _move(figure, runs)
    return figure


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
    title = figure.layout.xaxis.title.text or ""
    return title.startswith(VERSIONS) and all(trace.type == "scatter" for trace in figure.data)


def _move(figure: go.Figure, runs: Sequence[RunData]) -> None:
    """Converts policy versions to minutes by the clock of a trace's run, which the trace's name begins with."""
    clocks = {plain(run.info.run_id): clock(run) for run in runs}
    first, *more = clocks.values()

    def moved(x: Any, at: ChartLine) -> Any:
        return np.interp(np.asarray(x, np.float64), at.x, at.y) if len(at.x) else x

    for trace in figure.data:
        trace.x = moved(trace.x, clocks[(trace.legendgroup or "").partition(", ")[0]] if more else first)
    for shape in figure.layout.shapes:
        if shape.xref != "x domain":
            shape.x0, shape.x1 = moved([shape.x0, shape.x1], first)
    for note in figure.layout.annotations:
        if note.xref != "paper":
            note.x = float(moved(note.x, first))
    figure.update_xaxes(title={"text": figure.layout.xaxis.title.text.replace(VERSIONS, MINUTES)}, dtick=None)
