"""The page on which single groups are searched and read.

address ?group=… ──────────┐
fields + "Search" ─► query ┴─► find, over RunData.consumed ─► a table, 25 groups at a time
                     │         (text: prompts of the newest groups found, read from the store)
                     └► address, so that a link shows the same
?open=<generator>.<row> ─────► GroupReader ─► the group
"""

import threading
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component

from dashboard.data import RunData
from dashboard.group_view import outcomes, view
from dashboard.groups import MAX_TEXT_PARTS, GroupReader
from dashboard.pages.draw import problem_box
from dashboard.runs import Runs
from dashboard.search import (
    MAX_CHARACTERS,
    MAX_TEXT_GROUPS,
    PAGE_SIZE,
    Found,
    Query,
    address,
    find,
    from_address,
    parse,
    typed,
    with_text,
)
from dashboard.tokens import TokenTexts, read_tokens, visible
from millrace.errors import InputError, MillraceError
from storage.errors import StorageError
from storage.factory import open_store

_FIELDS = {
    "group": ("group id", "123", 8),
    "text": ("prompt's name or text", "43+31", 18),
    "generator": ("generator", "0", 5),
    "outcome": ("outcome", "trained, stale …", 11),
    "version": ("taken for version", "7, 7..9, 7.. or ..9", 12),
    "staleness": ("staleness, versions", "2..", 8),
    "reward": ("reward", "0.5..1", 8),
}
"""Field → its label, what may be typed, and its width in em."""
_ORDERS = {"newest": "newest first", "highest": "highest mean reward", "lowest": "lowest mean reward"}
_KEPT = 4
"""Runs whose groups were read last; each keeps a few parts in memory."""
_PROMPT_CHARACTERS = 80
_COLOURS = {
    "--Dash-Text-Primary": "var(--ink)",
    "--Dash-Text-Strong": "var(--ink)",
    "--Dash-Text-Weak": "var(--muted)",
    "--Dash-Text-Disabled": "var(--muted)",
    "--Dash-Fill-Inverse-Strong": "var(--card)",
    "--Dash-Fill-Interactive-Strong": "var(--accent)",
    "--Dash-Stroke-Strong": "var(--line)",
    "--Dash-Stroke-Weak": "var(--line)",
}
"""Dash's fields take the page's colours, light or dark."""
_ROW = {"display": "flex", "flexWrap": "wrap", "alignItems": "center", "gap": "8px 16px"}
_COLUMN = {"display": "flex", "flexDirection": "column", "gap": "12px"}
_LIST_PIXELS = {False: 520, True: 240}
"""Most that the list of groups takes of the page's height: alone, and above a group that is open."""


def layout(run_id: str) -> Component:
    """The page of one run; what is asked for stands in the address."""
    fields = [
        html.Label(
            [
                html.Span(label, className="name"),
                dcc.Input(
                    id=_id(name), type="text", placeholder=hint, maxLength=MAX_CHARACTERS, style={"width": f"{width}em"}
                ),
            ],
            className="field",
            style={"display": "flex", "flexDirection": "column"},
        )
        for name, (label, hint, width) in _FIELDS.items()
    ]
    order = dcc.RadioItems(id=_id("order"), options=_ORDERS, value="newest", inline=True)
    sentence = (
        "Groups of responses to one prompt, as the trainer took them. A group is found if any of its responses fits. "
        f"A text is looked for in the prompts of the newest {MAX_TEXT_GROUPS:,} groups that fit the rest, from "
        f"{MAX_TEXT_PARTS} parts at most. The address holds the query: copy it to share what you see."
    )
    return html.Div(
        [
            dcc.Location(id=_id("address"), refresh=False),
            dcc.Store(id=_id("run"), data=run_id),
            html.P(sentence, className="sentence"),
            html.Div(fields, className="fields", style=_ROW),
            html.Div([html.Button("Search", id=_id("search"), className="button"), order], style=_ROW),
            html.Div(id=_id("found")),
            html.Div(id=_id("group")),
        ],
        style={**_COLOURS, **_COLUMN},
    )


def register(app: Dash, runs: Runs) -> None:
    """Adds the callback that answers a query."""
    opened = Opened()

    names = (*_FIELDS, "order")

    @app.callback(
        output={
            "search": Output(_id("address"), "search"),
            "found": Output(_id("found"), "children"),
            "group": Output(_id("group"), "children"),
            "words": {name: Output(_id(name), "value") for name in names},
        },
        inputs={
            "search": Input(_id("address"), "search"),
            "asked": [Input(_id("search"), "n_clicks"), *(Input(_id(name), "n_submit") for name in _FIELDS)],
        },
        state={"run_id": State(_id("run"), "data"), "words": {name: State(_id(name), "value") for name in names}},
    )
    def show(search: str | None, asked: Any, run_id: str, words: Mapping[str, str | None]) -> dict[str, Any]:
        here: Any = no_update
        values: dict[str, Any] = dict.fromkeys(names, no_update)
        try:
            if ctx.triggered_id in (None, _id("address")):
                query = from_address(search or "")
                values = {**dict.fromkeys(names, ""), "order": "newest", **_of(names, typed(query))}
            else:
                query = parse({name: word or "" for name, word in words.items()})
                here = address(query)
            found, group = answer(runs, opened, run_id, query)
        except (StorageError, MillraceError, OSError) as error:
            found, group = problem_box([visible(str(error))]), None
        return {"search": here, "found": found, "group": group, "words": values}


class Opened:
    """The readers of the runs looked at last; thread-safe."""

    def __init__(self) -> None:
        self._readers: dict[tuple[str, float], tuple[GroupReader, TokenTexts]] = {}
        self._lock = threading.Lock()

    def of(self, run: RunData) -> tuple[GroupReader, TokenTexts]:
        """What reads the groups of a run, and its tokens."""
        # Another run may come to lie at the place of one that was deleted.
        key = run.facts.url, run.facts.attempts[0].t_started
        with self._lock:
            found = self._readers.pop(key, None)
            if found is None:
                store = open_store(run.facts.url)
                found = GroupReader(store, run.facts.config), read_tokens(store, run.facts.config)
            self._readers[key] = found
            while len(self._readers) > _KEPT:
                self._readers.pop(next(iter(self._readers)))
            return found


def answer(runs: Runs, opened: Opened, run_id: str, query: Query) -> tuple[Component, Component | None]:
    """The groups found, and the one that is open. Raises InputError and what reading the run raises."""
    try:
        run = runs.reader(run_id).look()
    except KeyError as error:
        raise InputError(f"there is no run {run_id!r} here") from error
    reader, texts = opened.of(run)
    found = find(run.consumed, run.outcomes, query)
    notes = []
    if query.text:
        found, note = _with_text(run, reader, texts, found, query.text)
        notes.append(note)
    place = query.open or _only(run, reader, found, query)
    group = None if place is None else view(reader.read(run, *place), texts)
    listed = _table(run, reader, texts, found, query, notes, pixels=_LIST_PIXELS[group is not None])
    return listed, group


def _with_text(run: RunData, reader: GroupReader, texts: TokenTexts, found: Found, text: str) -> tuple[Found, str]:
    """Those whose prompts hold the text, and a sentence on how many were read."""
    num_read = 0

    def prompts(firsts: Sequence[int]) -> Mapping[int, str]:
        nonlocal num_read
        told = _prompts(run, reader, texts, firsts)
        num_read = len(told)
        return told

    held = with_text(found, text, prompts)
    return held, f"The prompts of {num_read:,} of {len(found.starts):,} groups were searched."


def _prompts(run: RunData, reader: GroupReader, texts: TokenTexts, firsts: Sequence[int]) -> dict[int, str]:
    """Name and text of the prompt, by the place of a group's first row; those that can't be read are left out."""
    places = {first: _place(run, first) for first in firsts}
    read = reader.prompts(list(places.values()))
    told = {first: read[place] for first, place in places.items() if place in read}
    return {first: f"{name}  {texts.text(ids)}" for first, (name, ids) in told.items()}


def _only(run: RunData, reader: GroupReader, found: Found, query: Query) -> tuple[int, int] | None:
    """What to open where nothing is said: the one group found, or one asked for that was not taken yet."""
    if len(found.starts) == 1:
        return _place(run, int(found.starts[0]))
    if len(found.starts) == 0 and query == Query(group=query.group) and query.group is not None:
        return reader.locate(query.group)
    return None


def _place(run: RunData, row: int) -> tuple[int, int]:
    """Generator and row_id at a place of `consumed`."""
    return int(run.consumed["generator"][row]), int(run.consumed["trajectory_row_id"][row])


def _table(
    run: RunData,
    reader: GroupReader,
    texts: TokenTexts,
    found: Found,
    query: Query,
    notes: Sequence[str],
    *,
    pixels: int,
) -> Component:
    shown = found.page(query.page)
    first = query.page * PAGE_SIZE
    count = "1 group found" if len(found.starts) == 1 else f"{len(found.starts):,} groups found"
    notes = [f"{count}, {first + 1:,} to {first + len(shown):,} shown." if len(shown) > 1 else f"{count}.", *notes]
    pages = [
        dcc.Link(label, href=address(replace(query, page=query.page + step, open=None)), className="button")
        for label, step, there in (
            ("previous", -1, query.page > 0),
            ("next", 1, first + PAGE_SIZE < len(found.starts)),
        )
        if there
    ]
    prompts = _prompts(run, reader, texts, [start for start, _ in shown])
    header = ("group", "prompt", "generator", "for version", "outcomes", "mean reward", "staleness", "mean tokens")
    rows = [html.Tr([html.Td(cell) for cell in _cells(run, span, query, prompts)]) for span in shown]
    table = html.Table([html.Thead(html.Tr([html.Th(name, scope="col") for name in header])), html.Tbody(rows)])
    parts: list[Component] = [html.P(" ".join(notes), className="note")]
    parts += [html.Div(table, className="table", style={"maxHeight": f"{pixels}px"})] if rows else []
    parts += [html.Div(pages, style=_ROW)] if pages else []
    return html.Section(parts, className="block wide", style=_COLUMN)


def _cells(run: RunData, span: tuple[int, int], query: Query, prompts: Mapping[int, str]) -> list[Any]:
    first, end = span
    rows = {name: column[first:end] for name, column in run.consumed.items()}
    codes, counts = np.unique(rows["outcome"], return_counts=True)
    group_id, rewards = int(rows["group_id"][0]), rows["reward"][np.isfinite(rows["reward"])]
    prompt = visible(prompts.get(first, ""))
    return [
        dcc.Link(
            str(group_id) if group_id >= 0 else "can't be read",
            href=address(replace(query, open=_place(run, first))),
        ),
        prompt if len(prompt) <= _PROMPT_CHARACTERS else f"{prompt[:_PROMPT_CHARACTERS]}…",
        str(rows["generator"][0]),
        str(rows["policy_version"][0]),
        outcomes([(run.outcomes[code], int(count)) for code, count in zip(codes, counts, strict=True)]),
        f"{rewards.mean():.3g}" if len(rewards) else "none",
        str(rows["staleness"].max()),
        f"{rows['tokens'].mean():.3g}",
    ]


def _of(names: Sequence[str], values: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in values.items() if name in names}


def _id(name: str) -> str:
    return f"trajectories-{name}"
