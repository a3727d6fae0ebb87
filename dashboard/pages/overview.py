"""All runs in a table: their state, the age of their stages' status, and which are picked for comparison.

The picked runs are only in the address: a tick is a link to the page with one run added or removed.
"""

from collections.abc import Sequence

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import TEXT, grid
from dashboard.pages.frame import duration, number
from dashboard.read.runs import OverviewRow
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


def page(rows: Sequence[OverviewRow], picked: Sequence[str], url: str) -> Component:
    sentence = (
        "Every run found here: its progress, the staleness of the rollouts it was trained on, and the time since each "
        "of its stages last wrote its status."
    )
    inside = html.Div(table(rows, picked, url), id={"type": TEXT, "block": TABLE}, className="table")
    return html.Section([html.P(sentence, className="sentence"), inside], className="block wide")


def table(rows: Sequence[OverviewRow], picked: Sequence[str], url: str) -> list[Component]:
    if not rows:
        return [html.P(f"There is no run in {url} yet; this page keeps looking.", className="nowhere")]
    return [grid(_HEADER, [_row(row, picked) for row in rows]), _comparison(picked)]


def _row(row: OverviewRow, picked: Sequence[str]) -> Component:
    name = html.Td(dcc.Link(row.run_id, href=address.run(row.run_id)))
    if row.problem is not None:
        return html.Tr([html.Td(), name, html.Td(row.problem, colSpan=len(_HEADER) - 2, className="problem")])
    step = "–" if row.policy_version is None else f"{row.policy_version} of {row.max_steps}"
    staleness = "–" if row.staleness_mean is None else f"{row.staleness_mean:.2f}, {row.staleness_max}"
    ages = [html.Span(f"{stage} {duration(row.ages[stage])}", className="age") for stage in STAGES if stage in row.ages]
    return html.Tr(
        [
            html.Td(_tick(row.run_id, picked)),
            name,
            html.Td(html.Span(row.state, className=f"state {row.state}")),
            html.Td(step),
            html.Td(number(row.reward_mean)),
            html.Td(f"{staleness}, {row.max_staleness}"),
            html.Td(ages or "–"),
        ]
    )


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
