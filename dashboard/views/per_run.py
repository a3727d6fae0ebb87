"""Charts and tables for one run, or for several in comparison."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.series import ChartLine
from dashboard.read.model import RunData
from dashboard.views.blocks import Rows
from dashboard.views.colours import colour_number
from dashboard.views.figures import Series, line_chart

VERSIONS = "policy version"
MINUTES = "minutes since the run was started"
NO_STEP = "No step has finished yet."
NOT_RECORDED = "Not recorded in this run."

_FIRST_COLOUR = 2
"""Of the first source: the run's own lines are blue and orange."""

Build = Callable[[Sequence[RunData]], go.Figure]


def missing(runs: Sequence[RunData]) -> str:
    """Returns the reason that a chart of the trainer's steps is empty."""
    return NOT_RECORDED if any(len(run.recent.columns["t"]) for run in runs) else NO_STEP


def lines(
    single: Callable[[RunData], Sequence[Series]],
    compared: Callable[[RunData], ChartLine],
    *,
    x: str,
    y: str,
    empty: str | None = None,
    from_zero: bool = True,
    **options: Any,
) -> Build:
    """Builds a line chart: all series of a single run, or one line per run if several are compared.

    `options` are those of `line_chart`.
    """

    def build(runs: Sequence[RunData]) -> go.Figure:
        series = single(runs[0]) if len(runs) == 1 else line_per_run(runs, compared)
        return line_chart(series, x=x, y=y, empty=empty or missing(runs), from_zero=from_zero, **options)

    return build


def line_per_run(runs: Sequence[RunData], line: Callable[[RunData], ChartLine]) -> list[Series]:
    """Returns the line of each run, with its colour and name."""
    return [Series(name=run.info.run_id, line=line(run), colour=colour_number(index)) for index, run in enumerate(runs)]


def line_per_source(runs: Sequence[RunData], line: Callable[[RunData], ChartLine], figure: str = "") -> list[Series]:
    """Returns the line of each source of a single run with several; `figure` names it among the run's own lines."""
    by_source = runs[0].by_source if len(runs) == 1 else {}
    series = [
        Series(name=f"{source}, {figure}" if figure else source, line=line(of_source), colour=colour_number(index))
        for index, (source, of_source) in enumerate(by_source.items(), start=_FIRST_COLOUR)
    ]
    return [entry for entry in series if len(entry.line.x)]


def rows_per_run(
    runs: Sequence[RunData], header: Sequence[str], rows: Callable[[RunData], Sequence[Sequence[str]]]
) -> Rows:
    """Returns the rows of all runs; with several runs, each row starts with the run's name."""
    if len(runs) == 1:
        return Rows(header=header, rows=rows(runs[0]))
    return Rows(header=["run", *header], rows=[[run.info.run_id, *row] for run in runs for row in rows(run)])


def number(value: float, digits: int = 2, unit: str = "") -> str:
    """Formats a number for a table; NaN is a dash."""
    return f"{value:,.{digits}f}{unit}" if np.isfinite(value) else "–"
