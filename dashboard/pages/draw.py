"""Blocks as Dash components: a chart or a table in a frame with its title and its sentence.

What may change while the page is open has an id, so that a refresh can update it in place and a zoom survives:

{"type": "chart", "block": <block id>}     its `figure`, as a patch
{"type": "text", "block": <block id>}      its `children`
"""

import zlib
from collections.abc import Mapping, Sequence

import plotly.graph_objects as go
from dash import Patch, dcc, html
from dash.development.base_component import Component
from plotly.io.json import to_json_plotly as to_json

from dashboard.views.blocks import Block, Rows

CHART, TEXT = "chart", "text"
_HEIGHT = 320
"""Pixels, for a figure without a height of its own."""
_MODE_BAR = {"displaylogo": False, "showSendToCloud": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}


def draw(block: Block, built: go.Figure | Rows) -> Component:
    """The block in its frame; `built` is its content."""
    if isinstance(built, Rows):
        inside: Component = html.Div(table(built), id={"type": TEXT, "block": block.id}, className="table")
    else:
        inside = dcc.Graph(
            id={"type": CHART, "block": block.id},
            figure=built,
            config=_MODE_BAR,
            # The figure follows the window's width, and takes its height from the element.
            responsive=True,
            style={"height": f"{built.layout.height or _HEIGHT}px"},
        )
    return html.Section(
        [html.H2(block.title), html.P(block.sentence, className="sentence"), inside],
        id=block.id,
        className="block wide" if block.wide else "block",
    )


def sums(figure: go.Figure) -> dict[str, int]:
    """A checksum of each part of the figure's layout, such as an axis; and under "" of its traces' names and keys."""
    values = figure.to_plotly_json()
    traces = [(trace.get("name"), sorted(trace)) for trace in values["data"]]
    return {"": _sum(traces), **{name: _sum(part) for name, part in values["layout"].items()}}


def redraw(figure: go.Figure, drawn: Mapping[str, int]) -> Patch:
    """The patch that turns the figure on the page, whose `sums` are `drawn`, into `figure`.

    Dash and Plotly store the user's zoom and hidden lines in the figure on the page. So only parts that have changed
    are replaced: mostly numbers, seldom axes.
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
    """A table with its verdict and note."""
    parts: list[Component] = []
    if rows.verdict is not None:
        parts.append(html.P(rows.verdict, className=f"verdict {rows.verdict}"))
    if rows.note:
        parts.append(html.P(rows.note, className="note"))
    lines = [html.Tr([html.Td(cell) for cell in row]) for row in rows.rows]
    parts.append(grid(rows.header, lines or html.Tr(html.Td("none", colSpan=len(rows.header), className="none"))))
    return parts


def grid(header: Sequence[str], rows: Component | Sequence[Component]) -> Component:
    """A table element with these columns; `rows` are its `html.Tr`."""
    head = html.Thead(html.Tr([html.Th(name, scope="col") for name in header]))
    return html.Table([head, html.Tbody(rows)])


def problem_box(sentences: Sequence[str]) -> Component:
    """What could not be read or found; an empty element without problems."""
    shown = [html.P(sentence) for sentence in sentences]
    return html.Div(shown, className="problems" if shown else "", role="alert" if shown else "none")


def facts(named: Mapping[str, str], before: Sequence[Component] = ()) -> Component:
    """Names and values in one line, after `before`."""
    spans = [
        html.Span([html.Span(name, className="name"), " ", html.Span(value)], className="fact")
        for name, value in named.items()
    ]
    return html.Div([*before, *spans], className="facts")


def _sum(part: object) -> int:
    return zlib.crc32(to_json(part).encode())
