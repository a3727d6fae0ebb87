"""All runs in a table: how each does, when its stages were heard of last, and which are picked for comparison.

What is picked stands in the address alone: a tick is a link to the page with one run more, or one less.
"""

from collections.abc import Sequence

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import TEXT
from dashboard.pages.frame import duration, number
from dashboard.runs import OverviewRow
from millrace.status import STAGES

TABLE = "overview"
"""The id of the block whose text is the table."""
_HEADER = (
    "compare",
    "run",
    "state",
    "step (policy version)",
    "reward, mean of the last step",
    "staleness in policy versions: mean, largest, bound",
    "last sign of life",
)


def page(rows: Sequence[OverviewRow], picked: Sequence[str], url: str) -> Component:
    """The whole page."""
    sentence = (
        "Every run found here, how far it has come, how old the rollouts were that it trained on, and how long ago "
        "each of its stages was heard of."
    )
    inside = html.Div(table(rows, picked, url), id={"type": TEXT, "block": TABLE}, className="table")
    return html.Section([html.P(sentence, className="sentence"), inside], className="block wide")


def table(rows: Sequence[OverviewRow], picked: Sequence[str], url: str) -> list[Component]:
    """What of the page changes."""
    if not rows:
        return [html.P(f"There is no run in {url} yet; this page goes on looking.", className="nowhere")]
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in _HEADER]))
    body = html.Tbody([_row(row, picked) for row in rows])
    return [html.Table([head, body], className="runs"), _comparison(picked)]


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
