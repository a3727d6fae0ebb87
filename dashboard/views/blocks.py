"""The building blocks of a view: charts and tables with a description, for one run, or for several in comparison.

Blocks depend only on the data, so page, export and tests build the same blocks.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import plotly.graph_objects as go

from dashboard.queries.series import ChartLine
from dashboard.read.model import RunData
from dashboard.views.colours import colour_number
from dashboard.views.figures import Series, line_chart

VERSIONS = "policy version"
MINUTES = "minutes since the run was started"
NO_STEP = "No step has finished yet."
NOT_RECORDED = "Not recorded in this run."

_FIRST_COLOUR = 2
"""Of the first source: the run's own lines are blue and orange."""

Build = Callable[[Sequence[RunData]], go.Figure]


@dataclass(frozen=True, kw_only=True)
class Rows:
    """The content of a table: text only."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]
    verdict: str | None = None
    """`good` or `bad`, shown in green or red."""
    note: str = ""
    """Another sentence, such as an error."""
    values: bool = False
    """Whether all columns except the first contain values to compare, which are right-aligned."""


@dataclass(frozen=True, kw_only=True)
class Block:
    """A part of a view, built from one run or from several to compare: a chart or a table."""

    id: str
    """Unique among all blocks; letters, digits, dashes."""
    title: str
    sentence: str
    """Description for a first-time reader."""
    build: Callable[[Sequence[RunData]], go.Figure | Rows]
    wide: bool = False
    """Whether it takes the whole width of the page."""
    requires: Callable[[RunData], bool] | None = None
    """Whether a run has the data; the block is hidden if none of the runs does. None: always shown."""


@dataclass(frozen=True, kw_only=True)
class Chart(Block):
    """A figure."""

    build: Build


@dataclass(frozen=True, kw_only=True)
class Table(Block):
    """A table of text."""

    build: Callable[[Sequence[RunData]], Rows]


@dataclass(frozen=True, kw_only=True)
class View:
    """One page of a run."""

    name: str
    """Name in the address: letters and dashes."""
    title: str
    sentence: str
    blocks: Sequence[Block]
    num_key: int = 4
    """Number of blocks shown first; the page folds the others, and those without data."""
    is_smooth: bool = False
    """Whether its lines are smoothed already."""

    def blocks_for(self, runs: Sequence[RunData]) -> list[Block]:
        """Returns the blocks with data for at least one of the runs."""
        return [block for block in self.blocks if block.requires is None or any(map(block.requires, runs))]


def missing(runs: Sequence[RunData]) -> str:
    """Returns the reason that a chart of the trainer's steps is empty."""
    return NOT_RECORDED if any(len(run.recent["t"]) for run in runs) else NO_STEP


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


def number(value: float | None, digits: int = 2, unit: str = "", *, factor: float = 1.0) -> str:
    """Formats `factor` times a number for a table; None and NaN are a dash."""
    return "–" if value is None or not np.isfinite(value) else f"{factor * value:,.{digits}f}{unit}"
