"""What stands above every page: where one is, how the run does, where one can go, and what could not be read."""

import time
from collections.abc import Sequence

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.blocks import View
from dashboard.data import RunData
from dashboard.pages import address
from dashboard.pages.draw import problem_box


def frame(
    at: address.Address, found: Sequence[RunData], problems: Sequence[str], views: Sequence[View], url: str
) -> list[Component]:
    """The top of the page at `at`; `found` are the runs on it that can be read, `url` is where all of them lie."""
    place: list[Component] = [dcc.Link("Millrace", href=address.overview(), className="brand")]
    navigation: list[Component] = []
    shown = list(problems)
    if isinstance(at, address.RunPage):
        if at.compared:
            place += [html.H1("Comparison"), html.Div([_chip(run_id) for run_id in at.run_ids], className="facts")]
        else:
            place.append(html.H1(at.run_ids[0]))
            place += [facts(run) for run in found]
        shown += [sentence for run in found for sentence in _problems(run, named=at.compared)]
        navigation.append(html.Nav([_to_view(at, view) for view in views], **{"aria-label": "views"}))
    else:
        place += [html.H1("Runs"), html.Div(url, className="facts url")]
    return [html.Div(place, className="place"), *navigation, problem_box(shown)]


def facts(run: RunData) -> Component:
    """How the run does, in one line."""
    status = run.status or {}
    parts: list[Component] = []
    if status:
        staleness = status["staleness"]
        mean = "–" if staleness["mean"] is None else f"{staleness['mean']:.2f}"
        largest = "–" if staleness["max"] is None else str(staleness["max"])
        parts += [
            html.Span(status["state"], className=f"state {status['state']}"),
            _fact("step", f"{status['steps']} of {status['max_steps']}"),
            _fact("reward", number(status["reward_mean"])),
            _fact("staleness", f"mean {mean}, largest {largest}, bound {staleness['bound']}"),
        ]
    parts.append(_fact("updated", f"{age(last_sign(run))} ago"))
    return html.Div(parts, className="facts")


def last_sign(run: RunData) -> float:
    """When the run was heard of last, unix seconds: a sign of life, or its start."""
    started = max(attempt.t_started for attempt in run.facts.attempts)
    return max((float(life["t"]) for life in run.lives.values()), default=started)


def age(t: float) -> str:
    """How long ago `t` (unix seconds) was, in words as short as a cell."""
    return duration(time.time() - t)


def duration(seconds: float) -> str:
    """`seconds` in the largest unit that is not below 2 of it, but for seconds."""
    seconds = max(0.0, seconds)
    for unit, length in (("d", 86_400), ("h", 3600), ("min", 60)):
        if seconds >= 2 * length:
            return f"{seconds / length:.0f} {unit}"
    return f"{seconds:.0f} s"


def number(value: float | None) -> str:
    """`value` with three decimals; a dash for what is not known."""
    return "–" if value is None else f"{value:.3f}"


def _fact(name: str, value: str) -> Component:
    return html.Span([html.Span(name, className="name"), " ", html.Span(value)], className="fact")


def _chip(run_id: str) -> Component:
    return dcc.Link(run_id, href=address.run(run_id), className="chip")


def _problems(run: RunData, *, named: bool) -> list[str]:
    return [f"{run.facts.run_id}: {sentence}" if named else sentence for sentence in run.problems]


def _to_view(at: address.RunPage, view: View) -> Component:
    href = address.compare(at.run_ids, view.name) if at.compared else address.run(at.run_ids[0], view.name)
    return dcc.Link(view.title, href=href, className="here" if view.name == at.view else "")
