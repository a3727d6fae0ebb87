"""The choice of the two versions on the page of evaluations.

Each option's value is the address of the page with that version, so a choice only follows a link.
"""

from collections.abc import Mapping
from dataclasses import replace

import dash_mantine_components as dmc
from dash import Dash, Input, Output, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.read.model import RunData
from dashboard.views.display import Display
from dashboard.views.evaluation import versions

_BEFORE, _AFTER = "evaluation-before", "evaluation-after"
# Both have the address of the page as their value until the user chooses.
_FOLLOW = """(before, after) => {
    const chosen = dash_clientside.callback_context.triggered[0];
    return before === after || !chosen?.value ? dash_clientside.no_update : chosen.value;
}"""


def choice(at: address.RunPage, run: RunData) -> Component:
    """Draws a list of the evaluated versions for each of the two; nothing if fewer than two were evaluated."""
    pair = versions(run, at.display)
    if pair is None:
        return html.Div()
    chosen = replace(at.display, before=pair[0], after=pair[1])
    evaluated = zip(run.evaluations["policy_version"].tolist(), run.evaluations["accuracy"].tolist(), strict=True)
    labels = {version: f"version {version}, accuracy {accuracy:.3f}" for version, accuracy in evaluated}
    before = {replace(chosen, before=version): label for version, label in labels.items()}
    after = {replace(chosen, after=version): label for version, label in labels.items()}
    return html.Div(
        [_select(_BEFORE, "Before", before, chosen, at), _select(_AFTER, "After", after, chosen, at)],
        id="evaluation-choice",
        className="row",
    )


def register(app: Dash) -> None:
    """Adds the callback that opens the page of a chosen version."""
    app.clientside_callback(_FOLLOW, Output("address", "href"), Input(_BEFORE, "value"), Input(_AFTER, "value"))


def _select(
    element: str, label: str, choices: Mapping[Display, str], chosen: Display, at: address.RunPage
) -> Component:
    options = [{"value": address.shown_as(at, display), "label": name} for display, name in choices.items()]
    value = address.shown_as(at, chosen)
    return dmc.Select(id=element, label=label, data=options, value=value, allowDeselect=False, size="xs", w=240)
