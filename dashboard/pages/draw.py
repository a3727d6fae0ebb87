"""Blocks as Dash components: a chart or a table with its title and description; components that pages share.

Content that may change while the page is open has an id, so that a refresh updates it in place and a zoom survives:

{"type": "chart", "block": <block id>}     its `figure`, as a patch
{"type": "text", "block": <block id>}      its `children`
"""

import re
import zlib
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import plotly.graph_objects as go
from dash import Patch, dcc, html
from dash.development.base_component import Component
from plotly.io.json import to_json_plotly as to_json

from dashboard.read.groups import Row
from dashboard.read.tokens import TokenTexts, shortened, visible
from dashboard.views.blocks import Block, Rows

CHART, TEXT = "chart", "text"
_CHARACTERS = 300
_HEIGHT = 320
"""Default height of a figure, pixels."""
_NUMBER = re.compile(r"[-+]?[\d,]*\.?\d+(e[-+]?\d+)?( %)?")
_UNKNOWN = ("–", "none", "")
_MODE_BAR = {"displaylogo": False, "showSendToCloud": False, "modeBarButtonsToRemove": ["select2d", "lasso2d"]}
"""With a button that saves the chart as PNG."""


def draw(block: Block, built: go.Figure | Rows) -> Component:
    """Draws the block with its content `built`."""
    head: Component = html.H2(block.title)
    if isinstance(built, Rows):
        head = html.Div([head, saves()], className="head")
        inside: Component = scrolling(table(built), block.title, id={"type": TEXT, "block": block.id})
    else:
        height = {"height": f"{built.layout.height or _HEIGHT}px"}
        graph = dcc.Graph(
            id={"type": CHART, "block": block.id},
            figure=built,
            config={**_MODE_BAR, "toImageButtonOptions": {"filename": block.id, "scale": 2}},
            # The figure follows the window's width, and takes its height from the element.
            responsive=True,
            style=height,
        )
        # Reserves space for the chart while Plotly loads.
        inside = html.Figure(graph, style=height, **{"aria-label": block.title})
    return html.Section(
        [head, html.P(block.sentence, className="sentence"), inside],
        id=block.id,
        className="block wide" if block.wide else "block",
    )


def sums(figure: go.Figure) -> dict[str, int]:
    """Returns a checksum of each part of the layout, such as an axis, and under "" of the traces' names and keys."""
    values = figure.to_plotly_json()
    traces = [(trace.get("name"), sorted(trace)) for trace in values["data"]]
    return {"": checksum(traces), **{name: checksum(part) for name, part in values["layout"].items()}}


def redraw(figure: go.Figure, drawn: Mapping[str, int]) -> Patch:
    """Returns the patch from the figure on the page, whose `sums` are `drawn`, to `figure`.

    Dash and Plotly store the user's zoom and hidden lines in the figure on the page, so only changed parts are
    replaced: usually numbers, rarely axes.
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
    """Draws a table with its verdict and note."""
    parts: list[Component] = []
    if rows.verdict is not None:
        parts.append(html.P(rows.verdict, className=f"verdict {rows.verdict}"))
    if rows.note:
        parts.append(html.P(rows.note, className="note"))
    numbers = set(range(1, len(rows.header))) if rows.values else number_columns(rows.rows)
    return [*parts, grid(rows.header, rows.rows, numbers)]


def grid(header: Sequence[str], rows: Sequence[Sequence[str | Component]], numbers: Collection[int]) -> Component:
    """Draws a table element; the columns `numbers` are right-aligned. On a narrow screen each row is a card."""
    aligned = ["number" if column in numbers else "" for column in range(len(header))]
    heads = [
        html.Th(name, scope="col", className=align) if name else html.Td()
        for name, align in zip(header, aligned, strict=True)
    ]
    lines = [
        html.Tr(
            [
                html.Td(cell, className=align, **{"data-label": name})
                for cell, name, align in zip(row, header, aligned, strict=True)
            ]
        )
        for row in rows
    ]
    nothing = html.Tr(html.Td("none", colSpan=len(header), className="none"))
    return html.Table([html.Thead(html.Tr(heads)), html.Tbody(lines or nothing)])


def number_columns(rows: Sequence[Sequence[str | Component]]) -> set[int]:
    """Returns the columns that contain only numbers and unknown values."""
    columns = enumerate(zip(*rows, strict=True))
    return {
        i
        for i, cells in columns
        if all(isinstance(cell, str) and (cell in _UNKNOWN or _NUMBER.fullmatch(cell)) for cell in cells)
        and any(cell not in _UNKNOWN for cell in cells)
    }


def scrolling(inside: Sequence[Component], name: str, **properties: Any) -> Component:
    """Wraps a table in a region that can be scrolled by mouse or keyboard; `properties` belong to its element."""
    return html.Div(inside, className="table", role="region", tabIndex=0, **{"aria-label": name}, **properties)


def saves() -> Component:
    """Draws buttons that save the table of their section; `assets/table.js` does."""
    buttons = [
        html.Button(kind, className="save button", title=f"save this table as {kind}") for kind in ("CSV", "JSON")
    ]
    return html.Span(buttons, className="saves")


def problem_box(sentences: Sequence[str]) -> Component:
    """Draws read errors; without any, an empty element."""
    shown = [html.P(sentence) for sentence in sentences]
    return html.Div(shown, className="problems" if shown else "", role="alert" if shown else "none")


def reason(error: Exception) -> str:
    """Returns a fault in one line."""
    return shortened(visible(" ".join(f"{type(error).__name__}: {error}".split())), _CHARACTERS)


def facts(named: Mapping[str, str], leading: Sequence[Component] = ()) -> Component:
    """Draws names and values in one line, after `leading`."""
    spans = [
        html.Span([html.Span(name, className="name"), " ", html.Span(value)], className="fact")
        for name, value in named.items()
    ]
    return html.Div([*leading, *spans], className="facts")


def role_mark(role: str) -> Component:
    """Draws a small label with the role of a message."""
    return html.Span(visible(role), className="role")


def prompt_messages(trajectory: Row, texts: TokenTexts, most: int) -> list[Component]:
    """Draws the prompt, at most `most` characters per message, with a role label before each message."""
    tokens = trajectory["prompt_tokens"]
    begun = [(role, start) for role, start in _starts(trajectory) if start <= len(tokens)]
    if not begun:
        return [html.Div(shortened(visible(texts.text(tokens)), most))]
    ends = [*(start for _, start in begun[1:]), len(tokens)]
    return [
        html.Div([role_mark(role), shortened(visible(texts.text(tokens[start:end])), most)])
        for (role, start), end in zip(begun, ends, strict=True)
    ]


def roles_in_response(trajectory: Row) -> dict[int, str]:
    """Maps the response token that begins a message to its role, for messages after the policy's first turn."""
    first = len(trajectory["prompt_tokens"])
    return {start - first: role for role, start in _starts(trajectory) if start > first}


def _starts(trajectory: Row) -> list[tuple[str, int]]:
    return list(zip(trajectory["message_roles"], trajectory["message_starts"], strict=True))


def checksum(part: object) -> int:
    """Returns a checksum of components or a part of a figure."""
    return zlib.crc32(to_json(part).encode())
