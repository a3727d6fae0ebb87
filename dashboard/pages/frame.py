"""The top of every page: title, the run's state, navigation with chart options, the verdict and read errors."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

import dash_mantine_components as dmc
from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import facts, problem_box
from dashboard.pages.pipeline import picture
from dashboard.queries.verdict.advice import judge
from dashboard.queries.verdict.facts import read_facts
from dashboard.queries.verdict.rules import Clause, duration, worst
from dashboard.read.model import RunData
from dashboard.views.blocks import Chart, View
from dashboard.views.display import SMOOTHINGS, Display
from dashboard.views.home import HOME
from millrace.runtime.metrics import RECENT_STEPS

ICONS = {"good": "✓", "warning": "▲", "bad": "✕", "neutral": "·"}
"""Icons show the level to readers who can't distinguish the colours."""
_SMALL = {"size": "compact-xs", "buttonProps": {"variant": "default"}, "className": "copy"}


def frame(
    at: address.Address, runs: Sequence[RunData], problems: Sequence[str], views: Sequence[View], url: str
) -> list[Component]:
    """Draws the top of the page at `at`; `runs` are its readable runs, `url` is the root of all runs."""
    title: list[Component] = [dcc.Link("Millrace", href=address.overview(), className="brand")]
    below: list[Component] = []
    shown = list(problems)
    if isinstance(at, address.RunPage):
        is_home = at.view == HOME.name
        if at.compared:
            chips = [dcc.Link(run_id, href=address.run(run_id), className="chip") for run_id in at.run_ids]
            title += [html.H1("Comparison"), html.Div(chips, className="facts")]
        else:
            title += [html.H1(at.run_ids[0], title=at.run_ids[0]), *map(run_facts, runs)]
        names = {run.info.run_id: f"{run.info.run_id}: " if at.compared else "" for run in runs}
        shown += [names[run.info.run_id] + sentence for run in runs for sentence in run.problems]
        links = html.Nav([_to_view(at, view) for view in views], **{"aria-label": "views"})
        here = next(view for view in views if view.name == at.view)
        below.append(html.Div([links, *_controls(at, here)], className="row views"))
        if not at.compared:
            below += [strip(run, brief=not is_home) for run in runs]
        if is_home:
            below += map(picture, runs)
    else:
        title += [html.H1("Runs"), html.Div(url, className="facts url")]
    return [html.Div(title, className="place"), *below, problem_box(shown)]


def run_facts(run: RunData) -> Component:
    """Draws the run's state in one line."""
    status, facts_of_run = run.status or {}, read_facts(run)
    named: dict[str, str] = {}
    state: list[Component] = []
    if status:
        state = [html.Span(status["state"], className=f"state {status['state']}")]
        named = {"step": f"{status['steps']} of {status['max_steps']}"}
    name = "loss" if facts_of_run.supervised else "reward"
    named[f"{name}, last {RECENT_STEPS} steps"] = number(
        facts_of_run.loss if facts_of_run.supervised else facts_of_run.reward_mean
    )
    started = max(attempt.t_started for attempt in run.info.attempts)
    newest = max((float(record["t"]) for record in run.stage_status.values()), default=started)
    moment = time.strftime("%Y-%m-%d %H:%M:%S %Z", time.localtime(newest))
    state.append(html.Span(f"{duration(time.time() - newest)} ago", title=f"last status: {moment}", className="none"))
    return facts(named, state)


def number(value: float | None) -> str:
    """Formats `value` with three decimals; a dash if unknown."""
    return "–" if value is None else f"{value:.3f}"


def _to_view(at: address.RunPage, view: View) -> Component:
    href = address.shown_as(replace(at, view=view.name), at.display)
    return dcc.Link(view.title, href=href, className="here" if view.name == at.view else "")


def _controls(at: address.RunPage, view: View) -> list[Component]:
    """Draws the options of a view's charts as links to the same page."""
    if not any(isinstance(block, Chart) for block in view.blocks):
        return []
    smoothings = {"off" if n == 1 else str(n): replace(at.display, smoothing=n) for n in SMOOTHINGS}
    axes = {"version": replace(at.display, by_time=False), "time": replace(at.display, by_time=True)}
    rows = [] if view.is_smooth else [_choice("Smoothing", smoothings, at)]
    return [html.Div([*rows, _choice("x axis", axes, at)], className="controls")]


def _choice(name: str, choices: Mapping[str, Display], at: address.RunPage) -> Component:
    links = [
        dcc.Link(label, href=address.shown_as(at, display), className="here" if display == at.display else "")
        for label, display in choices.items()
    ]
    return html.Div([html.Span(name, className="name"), *links], role="group", **{"aria-label": name})


def strip(run: RunData, *, brief: bool = False) -> Component:
    """Draws all clauses of the verdict and the advice; `brief`: the worst clause alone."""
    verdict = judge(read_facts(run))
    shown = [worst(verdict.clauses)] if brief else verdict.clauses
    clauses = [html.Li(_clause(clause, run.info.run_id)) for clause in shown]
    advice = [] if brief else [html.P([html.Strong("Advice: "), *with_commands(verdict.advice)], className="advice")]
    return html.Section([html.Ul(clauses, className="clauses"), *advice], **{"aria-label": "verdict"})


def with_commands(sentence: str) -> list[str | Component]:
    """Gives the command in a sentence, between its first and last backquote, a button that copies it."""
    before, quote, rest = sentence.partition("`")
    if not quote:
        return [sentence]
    command, _, after = rest.rpartition("`")
    button = dmc.CopyButton("Copy", value=command, copiedChildren="Copied", **_SMALL)
    return [before, html.Code(command), " ", button, after]


def _clause(clause: Clause, run_id: str) -> Component:
    icon = html.Span(
        ICONS[clause.level], className="icon", title=clause.level, role="img", **{"aria-label": clause.level}
    )
    href = f"{address.run(run_id, clause.view)}#{clause.block}"
    return dcc.Link([icon, clause.words], href=href, className=clause.level)
