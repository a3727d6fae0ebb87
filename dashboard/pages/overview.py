"""The table of all runs: filtered, sorted, with optional config columns and checkboxes for a comparison.

The address holds all choices. Checkboxes, column heads and suggested columns are links to the page with one choice
changed; text typed into a field is added to the address too.
"""

import time
from collections.abc import Collection, Sequence
from dataclasses import replace

import numpy as np
from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from dashboard.pages import address, cells
from dashboard.pages.draw import TEXT, reason, saves, scrolling
from dashboard.pages.frame import with_commands
from dashboard.queries.run_table import ABSENT, predecessors, seeds, severity, value_of
from dashboard.queries.verdict.rules import SEVERITY, duration
from dashboard.read.model import OverviewRow
from dashboard.read.tokens import shortened, visible
from millrace.runtime.metrics import RECENT_STEPS

TABLE = "overview"
"""Id of the block with the table."""
_HEADS = {
    "run": "run",
    "attention": "verdict",
    "step": "step",
    "reward": "reward",
    "accuracy": "accuracy",
    "": "Δ before",
    "staleness": "staleness",
    "busiest": "busiest",
    "started": f"started, {time.strftime('%Z')}",
    "hours": "took",
    "note": "note",
}
"""Field → title of its column."""
_NUMBERS = ("step", "reward", "accuracy", "", "staleness", "busiest", "hours")
_UNSORTED = ("", "busiest")
_SUGGESTED = 8
_CELL_CHARACTERS, _KEY_CHARACTERS = 80, 60
_DAY = 86_400.0


def page(
    at: address.OverviewPage, differing: Sequence[str], keys: Sequence[str], table: Sequence[Component]
) -> Component:
    """Draws the page. `keys`: all config keys of the runs; `differing`: keys whose values differ between runs."""
    hint = "word, state=running, training.learning_rate>1e-5"
    chips = [
        dcc.Link(
            f"{shortened(visible(key), _KEY_CHARACTERS)} ✕",
            href=address.overview(replace(at, columns=tuple(other for other in at.columns if other != key))),
            title=f"remove the column {visible(key)}",
            className="chip",
        )
        for key in at.columns
    ]
    offered = [key for key in differing if key not in at.columns][:_SUGGESTED]
    suggested = [
        dcc.Link(
            f"+ {shortened(visible(key), _KEY_CHARACTERS)}",
            href=address.overview(replace(at, columns=(*at.columns, key))),
            title=f"add the column {visible(key)}",
        )
        for key in offered
        if len(at.columns) < address.MAX_COLUMNS
    ]
    columns = [
        html.Summary("Columns"),
        _field("column", "Add a column, then Enter", "", "a key of the config", options="runs-keys"),
        html.Datalist([html.Option(value=key) for key in keys], id="runs-keys"),
        html.Div([*chips, *([html.Span("The runs differ in:")] if suggested else []), *suggested], className="row"),
    ]
    return html.Section(
        [
            html.Div(
                [
                    _field("filter", "Filter, then Enter", at.filter, hint),
                    html.Details(columns, open=bool(at.columns), className="choices"),
                ],
                className="row trajectories",
            ),
            html.Div(table, id={"type": TEXT, "block": TABLE}),
        ],
        className="block wide column",
    )


def empty(url: str, *, is_missing: bool) -> list[Component]:
    """Draws a page without runs: the reason, and how to start one."""
    reason = f"The folder {url} does not exist." if is_missing else f"{url} has no runs yet."
    start = "Start one: `millrace run configs/presets/tiny-cpu.yaml`. This page keeps looking."
    return [html.P([html.Strong(reason), " ", *with_commands(start)], className="nowhere")]


def register(app: Dash) -> None:
    """Adds the callback that copies typed text into the address."""

    @app.callback(
        Output("address", "search"),
        Input("runs-filter", "value"),
        Input("runs-column", "value"),
        State("address", "search"),
        prevent_initial_call=True,
    )
    def choose(text: str | None, column: str | None, search: str | None) -> object:
        at = address.table_of(search or "")
        changed = replace(at, filter=(text or "").strip(), columns=at.columns)
        if column and column.strip() not in at.columns:
            changed = replace(changed, columns=(*at.columns, column.strip()))
        return no_update if changed == at else address.overview(changed).removeprefix("/")


def table(at: address.OverviewPage, rows: Sequence[OverviewRow], all_rows: Sequence[OverviewRow]) -> list[Component]:
    """Draws a summary of all runs, and the table of the filtered and sorted `rows`."""
    top = html.Div([_comparison(at.picked), *_summary(at, rows, all_rows), saves()], className="row")
    if not rows:
        everything = dcc.Link("Show all runs", href=address.overview(replace(at, filter="")))
        return [top, html.P([f"No run matches {visible(at.filter)}. ", everything], className="nowhere")]
    numeric = {key for key in at.columns if _is_numeric(rows, key)}
    shown = [name for name in _HEADS if name != "note" or any(row.note for row in rows)]
    heads = [
        html.Td(className="ticks"),
        *(_head(at, name, _HEADS[name], name in _NUMBERS) for name in shown),
        *(_head(at, key, visible(key), key in numeric) for key in at.columns),
    ]
    before = predecessors(all_rows)
    lines = [_line(at, row, before.get(row.run_id), shown, numeric) for row in rows]
    inside = [html.Table([html.Thead(html.Tr(heads)), html.Tbody(lines)], className="runs")]
    return [top, *map(_seeds, seeds(rows)), scrolling(inside, "runs")]


def _summary(at: address.OverviewPage, rows: Sequence[OverviewRow], all_rows: Sequence[OverviewRow]) -> list[Component]:
    """Answers at a glance: how many runs, which are alive, which need attention, what happened since yesterday."""
    count = f"{len(all_rows)} runs" if len(rows) == len(all_rows) else f"{len(rows)} of {len(all_rows)} runs"
    recent = sum(time.time() - (row.t_started or 0.0) < _DAY for row in all_rows)
    named = {
        f"{sum(row.state == 'running' for row in all_rows)} running": replace(at, filter="state=running"),
        f"{sum(severity(row) >= SEVERITY['warning'] for row in all_rows)} need attention": replace(
            at, filter="attention>=2"
        ),
        "best accuracy": replace(at, sort="-accuracy"),
        "newest": replace(at, sort="-started"),
    }
    links = [dcc.Link(text, href=address.overview(to), className="chip") for text, to in named.items()]
    words = f"{recent} started since yesterday; reward and staleness are those of the last {RECENT_STEPS} steps"
    started = html.Span(words, className="none")
    return [html.Strong("1 run" if count == "1 runs" else count), *links, started]


def _seeds(group: Sequence[OverviewRow]) -> Component:
    accuracies = np.array([row.accuracy for row in group], np.float64)
    names = ", ".join(row.run_id for row in group)
    words = f"{len(group)} runs differ only in seed and name: accuracy {accuracies.mean():.3f}, "
    words += f"from {accuracies.min():.3f} to {accuracies.max():.3f}"
    link = dcc.Link("compare", href=address.compare([row.run_id for row in group][: address.MAX_COMPARED]))
    return html.P([f"{words} ({names}), ", link], className="note")


def _line(
    at: address.OverviewPage,
    row: OverviewRow,
    previous: OverviewRow | None,
    shown: Sequence[str],
    numeric: Collection[str],
) -> Component:
    name = dcc.Link(row.run_id, href=address.run(row.run_id))
    problem = row.problem
    if problem is None:
        try:
            return html.Tr(
                [html.Td(_tick(at, row.run_id), className="ticks"), *_cells(at, row, previous, shown, numeric)]
            )
        except Exception as error:  # noqa: BLE001 - whatever is wrong with one run, the others are shown
            problem = f"it can't be judged: {reason(error)}"
    said = html.Td(visible(problem), colSpan=len(shown) + len(at.columns) - 1, className="problem")
    return html.Tr([html.Td(className="ticks"), html.Td(name), said])


def _cells(
    at: address.OverviewPage,
    row: OverviewRow,
    previous: OverviewRow | None,
    shown: Sequence[str],
    numeric: Collection[str],
) -> list[Component]:
    contents: dict[str, str | Component] = {
        "run": dcc.Link(row.run_id, href=address.run(row.run_id)),
        "attention": cells.verdict(row),
        "step": ABSENT if row.policy_version is None else f"{row.policy_version} of {row.max_steps}",
        "reward": cells.reward(row),
        "accuracy": cells.accuracy(row),
        "": cells.difference(row, previous),
        "staleness": cells.staleness(row),
        "busiest": cells.busiest(row),
        "started": ABSENT if row.t_started is None else time.strftime("%m-%d %H:%M", time.localtime(row.t_started)),
        "hours": ABSENT if row.wall_seconds is None else duration(row.wall_seconds),
        "note": html.Span(cells.note(at, row), title=visible(row.note)) if row.note else "",
    }
    settings = {key: shortened(visible(row.settings.get(key, ABSENT)), _CELL_CHARACTERS) for key in at.columns}
    return [
        html.Td(cell, className="number" if field in _NUMBERS or field in numeric else "", **{"data-label": title})
        for field, title, cell in (
            *((field, _HEADS[field], contents[field]) for field in shown),
            *((key, visible(key), cell) for key, cell in settings.items()),
        )
    ]


def _head(at: address.OverviewPage, name: str, title: str, is_number: bool) -> Component:
    """Draws the head of a column: a link that sorts by it or reverses the order."""
    if name in _UNSORTED:
        return html.Th(title, scope="col", className="number")
    up, down = at.sort == name, at.sort == f"-{name}"
    # Numbers are first sorted in descending order.
    next_sort = f"-{name}" if up or (is_number and not down) else name
    return html.Th(
        dcc.Link(
            f"{shortened(title, _KEY_CHARACTERS)}{' ▲' if up else ' ▼' if down else ''}",
            href=address.overview(replace(at, sort=next_sort)),
            title=f"sort by {title}",
            id={"type": "sort", "by": name},
        ),
        scope="col",
        className="number" if is_number else "",
        **{"aria-sort": "ascending" if up else "descending" if down else "none"},
    )


def _tick(at: address.OverviewPage, run_id: str) -> Component:
    chosen = run_id in at.picked
    full = not chosen and len(at.picked) >= address.MAX_COMPARED
    remaining = tuple(other for other in at.picked if other != run_id)
    return dcc.Link(
        "☑" if chosen else "☐",
        href=address.overview(replace(at, picked=remaining if chosen or full else (*at.picked, run_id))),
        title=f"{'do not compare' if chosen else 'compare'} {run_id}",
        id={"type": "tick", "run": run_id},
        className="tick",
    )


def _comparison(picked: Sequence[str]) -> Component:
    if not picked:
        return html.Span(f"Tick up to {address.MAX_COMPARED} runs to compare them.")
    runs = "1 run" if len(picked) == 1 else f"{len(picked)} runs"
    return dcc.Link(f"Compare {runs}", href=address.compare(picked), className="button")


def _is_numeric(rows: Sequence[OverviewRow], key: str) -> bool:
    values = [value_of(row, key) for row in rows]
    return any(value is not None for value in values) and not any(isinstance(value, str) for value in values)


def _field(name: str, label: str, value: str, hint: str, options: str | None = None) -> Component:
    typed = dcc.Input(
        id=f"runs-{name}",
        type="text",
        value=value,
        placeholder=hint,
        debounce=True,
        maxLength=address.MAX_CHARACTERS,
        **({} if options is None else {"list": options}),
    )
    return html.Label([html.Span(label, className="name"), typed], className="field")
