"""The first pages of a comparison: different settings, final figures, and metrics over versions and time."""

from collections.abc import Sequence

from dashboard.queries import phases
from dashboard.queries.runs import comparison as queries
from dashboard.read.model import RunData
from dashboard.read.tokens import shortened, visible
from dashboard.views.blocks import Chart, Rows, Table, View
from dashboard.views.comparison.charts import charts, progress
from dashboard.views.per_run import MINUTES, VERSIONS

_CELL_CHARACTERS = 200


def _differences(runs: Sequence[RunData]) -> Rows:
    rows = [
        [shortened(visible(text), _CELL_CHARACTERS) for text in (key, *values)]
        for key, values in queries.differences(runs)
    ]
    note = "" if rows or len(runs) == 1 else "All settings are the same."
    return Rows(header=["setting", *_names(runs)], rows=rows, note=note, values=True)


def _figures(runs: Sequence[RunData]) -> Rows:
    figures = [queries.figures(run) for run in runs]
    rows = [[name, *(visible(values[name]) for values in figures)] for name in figures[0]]
    return Rows(header=["", *_names(runs)], rows=rows, values=True)


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
            build=_differences,
            wide=True,
        ),
        Table(
            id="compare-figures",
            title="Final and best figures",
            sentence="In brackets: the policy version at which a figure was measured.",
            build=_figures,
            wide=True,
        ),
        *charts("compare", VERSIONS, lambda run, line: line),
    ),
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
)
