"""The first pages of a comparison: different settings, final figures, and metrics over versions and time."""

import re
from collections.abc import Sequence
from functools import partial

from dashboard.queries import phases
from dashboard.queries.runs import comparison as queries
from dashboard.queries.runs.table import is_incidental
from dashboard.read.model import RunData
from dashboard.read.tokens import shortened, visible
from dashboard.views.blocks import Chart, Rows, Table, View
from dashboard.views.comparison.charts import charts, progress
from dashboard.views.per_run import MINUTES, VERSIONS

_CELL_CHARACTERS = 200
_NUMBER = re.compile(r"-?\d+\.\d+")
_BETTER = {"reward": 1, "accuracy": 1, "sample size": 1, "seconds": -1, "dropped": -1}
"""Word in a figure's name → whether more is better (1) or less (-1)."""


def _differences(runs: Sequence[RunData], *, incidental: bool) -> Rows:
    rows = [
        [shortened(visible(text), _CELL_CHARACTERS) for text in (key, *values)]
        for key, values in queries.differences(runs)
        if is_incidental(key) == incidental
    ]
    note = "" if rows or len(runs) == 1 else "All settings are the same."
    return Rows(header=["setting", *_names(runs)], rows=rows, note=note, values=True)


def _figures(runs: Sequence[RunData]) -> Rows:
    figures = [queries.figures(run) for run in runs]
    rows = [[name, *_compared(name, [visible(values[name]) for values in figures])] for name in figures[0]]
    return Rows(header=["", *_names(runs)], rows=rows, values=True)


def _compared(name: str, texts: Sequence[str]) -> list[str]:
    """Adds the difference to the first run, and a star to the best if it is known which direction is better."""
    numbers = [float(number[0]) if (number := _NUMBER.match(text)) else None for text in texts]
    known = [number for number in numbers if number is not None]
    direction = next((sign for word, sign in _BETTER.items() if word in name), 0)
    if len(known) < 2 or not direction or None in numbers:
        return list(texts)
    best = max(known, key=lambda number: direction * number)
    decimals = len(str(texts[0]).partition(" ")[0].partition(".")[2])
    return [
        f"{text}{f', {number - known[0]:+.{decimals}f}' if place else ''}"
        f"{' ★' if number == best and len(set(known)) > 1 else ''}"
        for place, (text, number) in enumerate(zip(texts, known, strict=True))
    ]


def _names(runs: Sequence[RunData]) -> list[str]:
    return [run.info.run_id for run in runs]


COMPARISON = View(
    name="summary",
    title="Summary",
    sentence="Click a name in a legend to hide a run, double-click it to see that run alone.",
    blocks=(
        Table(
            id="compare-config",
            title="Different settings",
            sentence="Only the settings that are not the same in all of these runs.",
            build=partial(_differences, incidental=False),
            wide=True,
        ),
        Table(
            id="compare-figures",
            title="Final and best figures",
            sentence="In brackets: the policy version at which a figure was measured; then the difference to the first "
            "run. ★: the best.",
            build=_figures,
            wide=True,
        ),
        *charts("compare", VERSIONS, lambda run, line: line),
        Table(
            id="compare-incidental",
            title="Different names, seeds and addresses",
            sentence="Settings that differ and do not change what is learned.",
            build=partial(_differences, incidental=True),
            wide=True,
        ),
    ),
    num_key=8,
)
COMPARISON_BY_TIME = View(
    name="summary-time",
    title="By time",
    sentence="The same over wall time: which run is ahead after an hour?",
    blocks=(
        *charts("compare-time", MINUTES, phases.by_clock),
        Chart(
            id="compare-time-progress",
            title="Progress",
            sentence="The policy version that each run had reached: the steeper, the faster.",
            build=progress,
        ),
    ),
    num_key=7,
)
