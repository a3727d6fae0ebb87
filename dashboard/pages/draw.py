"""Blocks as Dash components: a chart or a table in a frame with its title and its sentence.

What may change while the page is open has an id of its own kind, so that a refresh can give it anew without putting it
up again, which would lose what a person zoomed into:

{"type": "chart", "block": <block id>}     its `figure`, as a patch
{"type": "text", "block": <block id>}      its `children`
"""

import zlib
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from dash import Patch, dcc, html
from dash.development.base_component import Component
from plotly.io.json import to_json_plotly as to_json

from dashboard.blocks import Block, Rows

CHART, TEXT = "chart", "text"
_HEIGHT = 320
"""Pixels, of a figure that does not say how high it is."""
_MODE_BAR = {"displaylogo": False, "showSendToCloud": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}


def draw(block: Block, built: go.Figure | Rows) -> Component:
    """The block in its frame; `built` is what it shows now."""
    if isinstance(built, Rows):
        inside: Component = html.Div(table(built), id={"type": TEXT, "block": block.id}, className="table")
    else:
        inside = dcc.Graph(
            id={"type": CHART, "block": block.id},
            figure=built,
            config=_MODE_BAR,
            # So that it follows the width of the window; its height is then the element's.
            responsive=True,
            style={"height": f"{built.layout.height or _HEIGHT}px"},
        )
    return html.Section(
        [html.H2(block.title), html.P(block.sentence, className="sentence"), inside],
        id=block.id,
        className="block wide" if block.wide else "block",
    )


def sums(figure: go.Figure) -> dict[str, int]:
    """A checksum of each part of the figure's layout, such as an axis; and under "", of what its traces are made of."""
    values = figure.to_plotly_json()
    traces = [(trace.get("name"), sorted(trace)) for trace in values["data"]]
    return {"": _sum(traces), **{name: _sum(part) for name, part in values["layout"].items()}}


def redraw(figure: go.Figure, drawn: Mapping[str, int]) -> Patch:
    """What makes `figure` of one that is on the page and has the `sums` called `drawn`.

    Dash and Plotly write what a person zooms to, and which lines are hidden, into the figure on the page. So only what
    has become another is replaced, part by part: numbers mostly, and axes seldom.
    """
    values, now = figure.to_plotly_json(), sums(figure)
    patch = Patch()
    if drawn.get("") == now[""]:
        for number, trace in enumerate(values["data"]):
            for name, value in trace.items():
                patch["data"][number][name] = value
    else:
        patch["data"] = values["data"]
    for name in (drawn.keys() | now.keys()) - {""}:
        if name not in now:
            del patch["layout"][name]
        elif drawn.get(name) != now[name]:
            patch["layout"][name] = values["layout"][name]
    return patch


def table(rows: Rows) -> list[Component]:
    """A table with its verdict, as it is now."""
    parts: list[Component] = []
    if rows.verdict is not None:
        parts.append(html.P(rows.verdict, className=f"verdict {rows.verdict}"))
    if rows.note:
        parts.append(html.P(rows.note, className="note"))
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in rows.header]))
    lines = [html.Tr([html.Td(cell) for cell in row]) for row in rows.rows]
    body = html.Tbody(lines or html.Tr(html.Td("none", colSpan=len(rows.header), className="none")))
    parts.append(html.Table([head, body]))
    return parts


def problem_box(sentences: Sequence[str]) -> Component:
    """What could not be read or found, for everybody to see; empty where all is well."""
    shown = [html.P(sentence) for sentence in sentences]
    return html.Div(shown, className="problems" if shown else "", role="alert" if shown else "none")


def _sum(part: object) -> int:
    return zlib.crc32(to_json(part).encode())
