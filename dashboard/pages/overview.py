"""All runs in a table: their state, the age of their stages' status, and which are picked for comparison.

The picked runs are only in the address: a tick is a link to the page with one run added or removed.
"""

from collections.abc import Sequence

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import TEXT, grid, scrolling
from dashboard.pages.frame import number
from dashboard.queries.verdict.rules import duration
from dashboard.read.runs import OverviewRow
from millrace.runs.planned import PLAN_NAMES, Comparison
from millrace.runs.status import STAGES

TABLE = "overview"
"""The id of the block whose text is the table."""
_HEADER = (
    "compare",
    "run",
    "state",
    "step (policy version)",
    "reward, mean of the last step",
    "staleness in policy versions: mean, largest, bound",
    "last status",
)
_PLANNED = "measured ÷ planned"


def page(rows: Sequence[OverviewRow], picked: Sequence[str], url: str) -> Component:
    sentence = (
        "Every run found here: its progress, the staleness of the rollouts it was trained on, and the time since each "
        "of its stages last wrote its status."
    )
    inside = scrolling(table(rows, picked, url), "runs", id={"type": TEXT, "block": TABLE})
    return html.Section([html.P(sentence, className="sentence"), inside], className="block wide")


def table(rows: Sequence[OverviewRow], picked: Sequence[str], url: str) -> list[Component]:
    if not rows:
        return [html.P(f"There is no run in {url} yet; this page keeps looking.", className="nowhere")]
    # A column for the runs that were planned, if there are any.
    planned = any(row.planned for row in rows)
    header = (*_HEADER, _PLANNED) if planned else _HEADER
    return [grid(header, [_row(row, picked, len(header)) for row in rows]), _comparison(picked)]


def _row(row: OverviewRow, picked: Sequence[str], columns: int) -> Component:
    name = html.Td(dcc.Link(row.run_id, href=address.run(row.run_id)))
    if row.problem is not None:
        return html.Tr([html.Td(), name, html.Td(row.problem, colSpan=columns - 2, className="problem")])
    step = "–" if row.policy_version is None else f"{row.policy_version} of {row.max_steps}"
    staleness = "–" if row.staleness_mean is None else f"{row.staleness_mean:.2f}, {row.staleness_max}"
    ages = [html.Span(f"{stage} {duration(row.ages[stage])}", className="age") for stage in STAGES if stage in row.ages]
    return html.Tr(
        [
            html.Td(_tick(row.run_id, picked)),
            name,
            html.Td(html.Span(row.state, className=f"state {row.state}")),
            html.Td(step),
            html.Td(number(row.reward_mean), className="number"),
            html.Td(f"{staleness}, {row.max_staleness}"),
            html.Td(ages or "–"),
            *([html.Td(_measured(row.planned) or "–")] if columns > len(_HEADER) else []),
        ]
    )


def _measured(planned: Sequence[Comparison]) -> list[Component]:
    """The ratio of each figure; both values where it can be pointed at."""
    return [
        html.Span(
            f"{PLAN_NAMES[one.name]} {'–' if one.ratio is None else f'{one.ratio:.2f}'}",
            title=f"measured {'–' if one.measured is None else f'{one.measured:.4g}'}, planned {one.planned:.4g}",
            className="age",
        )
        for one in planned
    ]


def _tick(run_id: str, picked: Sequence[str]) -> Component:
    chosen = run_id in picked
    others = [other for other in picked if other != run_id]
    full = not chosen and len(picked) >= address.MAX_COMPARED
    return dcc.Link(
        "☑" if chosen else "☐",
        href=address.overview(others if chosen or full else [*picked, run_id]),
        title=f"{'do not compare' if chosen else 'compare'} {run_id}",
        className="tick",
    )


def _comparison(picked: Sequence[str]) -> Component:
    if not picked:
        return html.P(f"Tick up to {address.MAX_COMPARED} runs to compare them.", className="note")
    runs = "1 run" if len(picked) == 1 else f"{len(picked)} runs"
    return html.P(dcc.Link(f"Compare {runs}", href=address.compare(picked), className="button"))
