"""Chart options as links to the same page: smoothing, and policy versions or wall time as x axis."""

from dataclasses import replace

from dash import dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.views.display import SMOOTHINGS, Display


def controls(at: address.RunPage) -> Component:
    """Returns a row of options; the x axis can be chosen only for a single run."""
    smoothings = {"off" if n == 1 else f"{n} versions": replace(at.display, smoothing=n) for n in SMOOTHINGS}
    rows = [_choice("Smoothing", smoothings, at)]
    if not at.compared:
        axes = {"version": replace(at.display, by_time=False), "wall time": replace(at.display, by_time=True)}
        rows.append(_choice("x axis", axes, at))
    return html.Div(rows, className="controls")


def _choice(name: str, choices: dict[str, Display], at: address.RunPage) -> Component:
    links = [
        dcc.Link(label, href=address.shown_as(at, display), className="here" if display == at.display else "")
        for label, display in choices.items()
    ]
    return html.Div([html.Span(name, className="name"), *links], role="group", **{"aria-label": name})
