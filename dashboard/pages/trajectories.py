"""The page that searches for groups and shows one in full.

address ?group=… ──────────┐
fields + "Search" ─► query ┴─► find, over RunData.consumed ─► a table, 25 groups at a time
                     │         (text: in prompts and responses of the first of these groups, read from the store)
                     └► address, so that a link shows the same groups
?open=<generator>.<row> ─────► GroupReader ─► the group

With ?order=live the page asks every second whether the trainer took more rows, and shows the newest group.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from dash import Dash, Input, Output, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import PreventUpdate

from dashboard.pages import timeline, versions
from dashboard.pages.draw import grid, number_columns, problem_box, saves, scrolling
from dashboard.pages.group import LEGENDS, view
from dashboard.read.groups import MAX_TEXT_ROWS, TEXT_SECONDS, Group, GroupReader, Place
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.read.runs import Runs
from dashboard.read.search import (
    MAX_CHARACTERS,
    PAGE_SIZE,
    Query,
    SearchResult,
    address,
    find,
    from_address,
    groups_of_prompt,
    parse,
    typed,
)
from dashboard.read.tokens import TokenTexts, visible
from millrace.errors import InputError, MillraceError
from storage.errors import StorageError

_FIELDS = {
    "group": ("group id", "123", 8),
    "text": ("text of a prompt or response", "43+31", 18),
    "generator": ("generator", "0", 5),
    "outcome": ("outcome", "trained, stale …", 11),
    "source": ("source", "math", 8),
    "version": ("taken for version", "7, 7..9, 7.. or ..9", 12),
    "staleness": ("staleness, versions", "2..", 8),
    "reward": ("reward", "0.5..1", 8),
}
"""Field → label, example and width in em."""
_ORDERS = {
    "newest": "newest first",
    "live": "newest, live",
    "highest": "highest mean reward",
    "lowest": "lowest mean reward",
}
_PROMPT_CHARACTERS = 80
_TICK_MS = 1000
_ENDLESS, _NO_TICKS = -1, 0


def layout(run_id: str, *, is_mixture: bool) -> Component:
    """Draws the page of a run; the address contains the query. The field `source` is only for a run with several."""
    fields = [
        html.Label(
            [
                html.Span(label, className="name"),
                dcc.Input(
                    id=_id(name), type="text", placeholder=hint, maxLength=MAX_CHARACTERS, style={"width": f"{width}em"}
                ),
            ],
            className="field",
            style={} if is_mixture or name != "source" else {"display": "none"},
        )
        for name, (label, hint, width) in _FIELDS.items()
    ]
    order = dcc.RadioItems(id=_id("order"), options=_ORDERS, value="newest", inline=True)
    sentence = (
        "Groups of responses to one prompt, as the trainer took them. A group matches if any of its responses does. "
        f"Text is searched in the prompts and responses of the groups that match the other fields, in their order, for "
        f"{TEXT_SECONDS:.0f} s and in at most {MAX_TEXT_ROWS:,} responses. The address contains the query: copy it to "
        "share this page."
    )
    manual = html.Details([html.Summary("How the search works"), html.P(sentence, className="sentence")])
    return html.Div(
        [
            dcc.Location(id=_id("address"), refresh=False),
            dcc.Store(id=_id("run"), data=run_id),
            dcc.Store(id=_id("rows")),
            dcc.Interval(id=_id("tick"), interval=_TICK_MS, max_intervals=_NO_TICKS),
            html.Div(fields, className="row"),
            html.Div([html.Button("Search", id=_id("search"), className="button"), order, manual], className="row"),
            html.Div([html.Div(id=_id("open")), html.Div(id=_id("found"))], className="beside"),
        ],
        className="column",
    )


def register(app: Dash, runs: Runs) -> None:
    """Adds the callback that answers queries."""
    names = (*_FIELDS, "order")

    @app.callback(
        output={
            "search": Output(_id("address"), "search"),
            "found": Output(_id("found"), "children"),
            "group": Output(_id("open"), "children"),
            "rows": Output(_id("rows"), "data"),
            "ticks": Output(_id("tick"), "max_intervals"),
            "words": {name: Output(_id(name), "value") for name in names},
        },
        inputs={
            "search": Input(_id("address"), "search"),
            "submitted": [Input(_id("search"), "n_clicks"), *(Input(_id(name), "n_submit") for name in _FIELDS)],
            "tick": Input(_id("tick"), "n_intervals"),
        },
        state={
            "run_id": State(_id("run"), "data"),
            "rows": State(_id("rows"), "data"),
            "words": {name: State(_id(name), "value") for name in names},
        },
        # A request that outlasts a second would be dropped for the next one.
        running=[(Output(_id("tick"), "disabled"), True, False)],
    )
    def show(
        search: str | None, submitted: Any, tick: Any, run_id: str, rows: int | None, words: Mapping[str, str | None]
    ) -> dict[str, Any]:
        here: Any = no_update
        values: dict[str, Any] = dict.fromkeys(names, no_update)
        is_tick, is_address = ctx.triggered_id == _id("tick"), ctx.triggered_id in (None, _id("address"))
        ticks, rows_now = _ENDLESS if is_tick else _NO_TICKS, rows
        try:
            if is_tick or is_address:
                query = from_address(search or "")
            else:
                query = parse({name: word or "" for name, word in words.items()})
                here = address(query)
            if is_address:
                shown = {"order": "newest", **typed(query)}
                values = {name: shown.get(name, "") for name in names}
            ticks = _ENDLESS if query.order == "live" else _NO_TICKS
            rows_now = len(_reader(runs, run_id).look().consumed["group_id"])
            if is_tick and rows_now == rows:
                raise PreventUpdate
            results, group = answer(runs, run_id, query)
        except (StorageError, MillraceError, OSError) as error:
            results, group = problem_box([visible(str(error))]), None
        return {"search": here, "found": results, "group": group, "rows": rows_now, "ticks": ticks, "words": values}


def answer(runs: Runs, run_id: str, query: Query) -> tuple[Component, Component | None]:
    """Draws the matching groups and the open group. Raises InputError and the errors of reading the run."""
    run_reader = _reader(runs, run_id)
    run, (reader, texts) = run_reader.look(), run_reader.groups()
    result = find(run.consumed, query)
    note, excerpts = "", dict[int, str]()
    if query.text:
        spans = list(zip(result.starts.tolist(), result.ends.tolist(), strict=True))[:MAX_TEXT_ROWS]
        starts = {run.consumed.place(start): start for start, _ in spans}
        sizes = {run.consumed.place(start): end - start for start, end in spans}
        matches, searched = reader.find_text(query.text, sizes, texts)
        excerpts = {starts[row]: excerpt for row, excerpt in matches.items()}
        note = f" {searched:,} of {len(result.starts):,} groups were searched."
        result = result.of(excerpts)
    row = query.open or _default_row(run, reader, result, query)
    group = None if row is None else _opened(run, reader, texts, row, query)
    shown = [start for start, _ in result.page(query.page)]
    prompts = {start: excerpts[start] for start in shown} if query.text else _prompts(run, reader, texts, shown)
    return _table(run, prompts, result, query, note), group


def _reader(runs: Runs, run_id: str) -> RunReader:
    """Raises InputError if there is no such run."""
    try:
        return runs.reader(run_id)
    except KeyError as error:
        raise InputError(f"the run {run_id!r} does not exist here") from error


def _opened(run: RunData, reader: GroupReader, texts: TokenTexts, row: Place, query: Query) -> Component:
    """Draws the group that contains `row`, or all groups of its prompt, with a link to switch between the two."""
    group = reader.read(run, *row)

    def link(other: Group) -> str:
        return address(replace(query, open=(other.generator, other.responses[0].row_id), versions=False))

    if group.prompt is None or not query.versions:
        same = dcc.Link("The same prompt at other versions", href=f"{link(group)}&versions=all", className="button")
        links = [] if group.prompt is None else [same]
        colours = [
            dcc.Link(
                name,
                href=f"{address(replace(query, open=(group.generator, group.responses[0].row_id), colour=colour))}",
                className="button here" if colour == query.colour else "button",
            )
            for colour, (name, _, _) in LEGENDS.items()
        ]
        choice = html.Div([html.Span("Colour of a token:", className="none"), *colours, *links], className="row")
        return html.Div([choice, view(group, texts, query.colour), *timeline.view(run, group)], className="column")
    opened = group.generator, group.responses[0].row_id
    places = groups_of_prompt(run, group.prompt["source"], group.prompt["prompt_id"])
    if opened not in places:
        # The trainer has not taken it yet.
        places.append(opened)
    groups = [reader.read(run, *place) for place in versions.chosen(places, opened)]
    back = html.Div(dcc.Link(f"Group {group.group_id} in full", href=link(group), className="button"), className="row")
    return html.Div([back, versions.view(groups, group, len(places), texts, link)], className="column")


def _prompts(run: RunData, reader: GroupReader, texts: TokenTexts, starts: Sequence[int]) -> dict[int, str]:
    """Maps a group's first index in `consumed` to its prompt's name and text; skips unreadable prompts."""
    rows = {start: run.consumed.place(start) for start in starts}
    read = reader.prompts(list(rows.values()))
    prompts = {start: read[row] for start, row in rows.items() if row in read}
    return {start: f"{name}  {texts.text(ids)}" for start, (name, ids) in prompts.items()}


def _default_row(run: RunData, reader: GroupReader, result: SearchResult, query: Query) -> Place | None:
    """Returns a row of the group to open: the newest if live, the only match, or the given id's if it was not taken."""
    if len(result.starts) == 1 or (query.order == "live" and len(result.starts)):
        return run.consumed.place(result.starts[0])
    if len(result.starts) == 0 and query == Query(group=query.group, colour=query.colour) and query.group is not None:
        return reader.locate(query.group)
    return None


def _table(run: RunData, prompts: Mapping[int, str], result: SearchResult, query: Query, note: str) -> Component:
    shown = result.page(query.page)
    first = query.page * PAGE_SIZE
    count = "1 group found" if len(result.starts) == 1 else f"{len(result.starts):,} groups found"
    count += f", {first + 1:,} to {first + len(shown):,} shown." if len(shown) > 1 else "."
    pages = [
        dcc.Link(label, href=address(replace(query, page=query.page + step, open=None)), className="button")
        for label, step, exists in (
            ("previous", -1, query.page > 0),
            ("next", 1, first + PAGE_SIZE < len(result.starts)),
        )
        if exists
    ]
    rows = [_cells(run, span, query, prompts) for span in shown]
    cells = [list(row.values()) for row in rows]
    parts: list[Component] = [html.Div([html.P(count + note, className="note"), saves()], className="head")]
    parts += [scrolling([grid(list(rows[0]), cells, number_columns(cells))], "groups found")] if rows else []
    parts += [html.Div(pages, className="row")] if pages else []
    return html.Section(parts, className="block wide column")


def _cells(run: RunData, span: tuple[int, int], query: Query, prompts: Mapping[int, str]) -> dict[str, Any]:
    """Column → cell of a group."""
    first, end = span
    rows = {name: column[first:end] for name, column in run.consumed.items()}
    codes, counts = np.unique(rows["outcome"], return_counts=True)
    group_id, rewards = int(rows["group_id"][0]), rows["reward"][np.isfinite(rows["reward"])]
    prompt, label = visible(prompts.get(first, "")), str(group_id) if group_id >= 0 else "can't be read"
    cells = {
        "group": dcc.Link(label, href=address(replace(query, open=run.consumed.place(first)))),
        "text" if query.text else "prompt": (
            prompt if len(prompt) <= _PROMPT_CHARACTERS else f"{prompt[:_PROMPT_CHARACTERS]}…"
        ),
        "generator": str(rows["generator"][0]),
        "for version": str(rows["policy_version"][0]),
        "outcomes": ", ".join(
            f"{n} {visible(run.consumed.outcomes[code])}" for code, n in zip(codes, counts, strict=True)
        ),
        "mean reward": f"{rewards.mean():.3g}" if len(rewards) else "none",
        "staleness": str(rows["staleness"].max()),
        "mean tokens": f"{rows['tokens'].mean():.3g}",
    }
    return cells | ({"source": visible(run.consumed.sources[rows["source"][0]])} if run.by_source else {})


def _id(name: str) -> str:
    return f"trajectories-{name}"
