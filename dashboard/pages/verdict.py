"""The verdict on a run: its clauses, each with an icon and a link to a chart, and the advice."""

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.queries.verdict.advice import judge
from dashboard.queries.verdict.facts import read_facts
from dashboard.queries.verdict.rules import Clause
from dashboard.read.model import RunData

_ICONS = {"good": "✓", "warning": "▲", "bad": "✕", "unknown": "?"}
"""Icons show the level to readers who can't distinguish the colours."""


def strip(run: RunData) -> Component:
    verdict = judge(read_facts(run))
    clauses = [html.Li(_clause(clause, run.info.run_id)) for clause in verdict.clauses]
    advice = html.P([html.Strong("Advice: "), verdict.advice], className="advice")
    return html.Section([html.Ul(clauses, className="clauses"), advice], **{"aria-label": "verdict"})


def _clause(clause: Clause, run_id: str) -> Component:
    icon = html.Span(
        _ICONS[clause.level], className="icon", title=clause.level, role="img", **{"aria-label": clause.level}
    )
    href = f"{address.run(run_id, clause.view)}#{clause.block}"
    return dcc.Link([icon, clause.words], href=href, className=clause.level)
