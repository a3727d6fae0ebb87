"""The verdict on a run: its clauses, each with an icon and a link to a chart, and the advice."""

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.queries.verdict.advice import judge
from dashboard.queries.verdict.facts import read_facts
from dashboard.queries.verdict.rules import Clause, worst
from dashboard.read.model import RunData

_SMALL = {"size": "compact-xs", "buttonProps": {"variant": "default"}, "className": "copy"}
ICONS = {"good": "✓", "warning": "▲", "bad": "✕", "unknown": "?"}
"""Icons show the level to readers who can't distinguish the colours."""


def strip(run: RunData, *, brief: bool = False) -> Component:
    """Draws all clauses and the advice; `brief`: the worst clause alone."""
    verdict = judge(read_facts(run))
    shown = [worst(verdict.clauses)] if brief else verdict.clauses
    clauses = [html.Li(_clause(clause, run.info.run_id)) for clause in shown]
    advice = [] if brief else [html.P([html.Strong("Advice: "), *with_commands(verdict.advice)], className="advice")]
    return html.Section([html.Ul(clauses, className="clauses"), *advice], **{"aria-label": "verdict"})


def with_commands(sentence: str) -> list[str | Component]:
    """Splits a sentence at its backquotes: commands get a button that copies them."""
    parts = list[str | Component]()
    for number, part in enumerate(sentence.split("`")):
        is_command = number % 2 and part.startswith("millrace")
        parts.append(html.Code(part) if number % 2 else part)
        if is_command:
            parts += [" ", dmc.CopyButton("Copy", value=part, copiedChildren="Copied", **_SMALL)]
    return parts


def _clause(clause: Clause, run_id: str) -> Component:
    icon = html.Span(
        ICONS[clause.level], className="icon", title=clause.level, role="img", **{"aria-label": clause.level}
    )
    href = f"{address.run(run_id, clause.view)}#{clause.block}"
    return dcc.Link([icon, clause.words], href=href, className=clause.level)
