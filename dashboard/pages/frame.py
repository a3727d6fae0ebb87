"""The top of every page: title, the run's state, navigation and read errors."""

import time
from collections.abc import Sequence
from dataclasses import replace

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import facts, problem_box
from dashboard.pages.pipeline import picture
from dashboard.pages.verdict import strip
from dashboard.queries.stragglers import BAND, biased_length
from dashboard.queries.verdict.rules import duration
from dashboard.read.model import RunData
from dashboard.views.blocks import View
from dashboard.views.home import HOME, HOME_BY_TIME
from millrace.runs.status import largest_and_bound


def frame(
    at: address.Address, runs: Sequence[RunData], problems: Sequence[str], views: Sequence[View], url: str
) -> list[Component]:
    """Draws the top of the page at `at`; `runs` are its readable runs, `url` is the root of all runs."""
    title: list[Component] = [dcc.Link("Millrace", href=address.overview(), className="brand")]
    below: list[Component] = []
    shown = list(problems)
    if isinstance(at, address.RunPage):
        is_home = at.view in (HOME.name, HOME_BY_TIME.name)
        if at.compared:
            chips = [dcc.Link(run_id, href=address.run(run_id), className="chip") for run_id in at.run_ids]
            title += [html.H1("Comparison"), html.Div(chips, className="facts")]
        else:
            title += [html.H1(at.run_ids[0], title=at.run_ids[0]), *map(run_facts, runs)]
        names = {run.info.run_id: f"{run.info.run_id}: " if at.compared else "" for run in runs}
        shown += [names[run.info.run_id] + sentence for run in runs for sentence in run.problems]
        below.append(html.Nav([_to_view(at, view) for view in views], **{"aria-label": "views"}))
        if not at.compared:
            below += [strip(run, brief=not is_home) for run in runs]
        if is_home:
            below += map(picture, runs)
    else:
        title += [html.H1("Runs"), html.Div(url, className="facts url")]
    return [html.Div(title, className="place"), *below, problem_box(shown)]


def run_facts(run: RunData) -> Component:
    """Draws the run's state in one line."""
    status = run.status or {}
    named: dict[str, str] = {}
    state: list[Component] = []
    if status:
        staleness = status["staleness"]
        mean = "–" if staleness["mean"] is None else f"{staleness['mean']:.2f}"
        largest = largest_and_bound(
            "–" if staleness["max"] is None else staleness["max"],
            staleness["bound"],
            admission_only=staleness["admission_only"],
        )
        state = [html.Span(status["state"], className=f"state {status['state']}")]
        named = {
            "step": f"{status['steps']} of {status['max_steps']}",
            "reward": number(status["reward_mean"]),
            "staleness": f"mean {mean}, largest {largest}",
        }
    if (ratio := biased_length(run)) is not None:
        low, high = BAND
        text = f"trained ÷ taken length {ratio:.3f}, outside {low} to {high}"
        state.append(html.Span(text, className="problem"))
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
