"""Chart options, applied to finished figures: smoothing, and policy versions or wall time as x axis.

    figure ─► each line: mean of the last versions, over its faint raw values ─► x in minutes ─► page

A line is smoothed before its x is converted, so that both x axes show the same values.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.series import ChartLine, apart, clock, mean_of_last, resumes
from dashboard.read.model import RunData
from dashboard.views.blocks import MINUTES, VERSIONS
from dashboard.views.figures import plain
from millrace.runtime.metrics import RECENT_STEPS

SMOOTHINGS = (1, 5, 10, 25, 50, 100)
"""Choices for the number of policy versions to average over."""
_FAINT = 0.28


@dataclass(frozen=True, kw_only=True)
class Display:
    """Options of a page, from its address."""

    smoothing: int = RECENT_STEPS
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
            means = mean_of_last(ChartLine(np.arange(len(x), dtype=np.float64), y), smoothing).y
            smooth = ChartLine(x, np.where(np.isfinite(y), means, np.nan))
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


def _part(trace: Any, run: RunData) -> None:
    """Breaks a line, a band or an area over minutes where the run was resumed."""
    x, y = np.asarray(trace.x, np.float64), np.asarray(trace.y, np.float64)
    if trace.fill == "toself":
        # The upper end of a band, then its lower end from the right.
        half = len(x) // 2
        at = resumes(run, x[:half])
        ends = zip(np.split(x[:half], at), np.split(y[:half], at), np.split(y[: half - 1 : -1], at), strict=True)
        gap = [np.nan]
        parts = [(np.r_[xs, xs[::-1], gap], np.r_[high, low[::-1], gap]) for xs, high, low in ends]
        trace.x, trace.y = (np.concatenate(axis)[:-1] for axis in zip(*parts, strict=True))
        return
    if trace.stackgroup is None:
        trace.x, trace.y = apart(run, ChartLine(x, y))
        return
    at = resumes(run, x)
    trace.x = np.insert(x, np.repeat(at, 2), np.stack([x[at - 1], x[at]], 1).ravel())
    trace.y = np.insert(y, np.repeat(at, 2), 0.0)


def _move(figure: go.Figure, runs: Sequence[RunData]) -> None:
    """Converts policy versions to minutes by the clock of a trace's run, which the trace's name begins with."""
    named = {plain(run.info.run_id): run for run in runs}
    clocks = {name: clock(run) for name, run in named.items()}
    first, *more = clocks.values()

    def moved(x: Any, at: ChartLine) -> Any:
        return np.interp(np.asarray(x, np.float64), at.x, at.y) if len(at.x) else x

    for trace in figure.data:
        name = (trace.legendgroup or "").partition(", ")[0] if more else next(iter(named))
        trace.x = moved(trace.x, clocks[name])
        if "lines" in (trace.mode or ""):
            _part(trace, named[name])
    for shape in figure.layout.shapes:
        if shape.xref != "x domain":
            shape.x0, shape.x1 = moved([shape.x0, shape.x1], first)
    for note in figure.layout.annotations:
        if note.xref != "paper":
            note.x = float(moved(note.x, first))
    figure.update_xaxes(title={"text": figure.layout.xaxis.title.text.replace(VERSIONS, MINUTES)}, dtick=None)
