"""One run or several: what is a line, or some rows, of each."""

from collections.abc import Callable, Sequence

import numpy as np

from dashboard.blocks import Rows
from dashboard.colours import colour_number
from dashboard.data import RunData
from dashboard.figures import Series
from dashboard.queries.series import Line

VERSIONS = "policy version"
MINUTES = "minutes since the run was started"
NO_STEP = "No step was finished yet."


def line_a_run(runs: Sequence[RunData], line: Callable[[RunData], Line]) -> list[Series]:
    """The same line of each run, in its colour and under its name."""
    return [
        Series(name=run.facts.run_id, x=found.x, y=found.y, colour=colour_number(number))
        for number, run in enumerate(runs)
        for found in (line(run),)
    ]


def rows_a_run(
    runs: Sequence[RunData], header: Sequence[str], rows: Callable[[RunData], Sequence[Sequence[str]]]
) -> Rows:
    """The rows of each run; where there are several, its name before each of them."""
    if len(runs) == 1:
        return Rows(header=header, rows=rows(runs[0]))
    return Rows(header=["run", *header], rows=[[run.facts.run_id, *row] for run in runs for row in rows(run)])


def number(value: float, digits: int = 2, unit: str = "") -> str:
    """For a table; a dash where there is none."""
    return f"{value:,.{digits}f}{unit}" if np.isfinite(value) else "–"
