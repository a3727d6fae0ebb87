"""The table of all runs: filtered, sorted, with columns of the reader's choice, and ticks for a comparison.

What the reader has chosen is only in the address. A tick, a column's head and a suggested column are links to the page
with one thing changed; what is typed into a field goes into the address too.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from dash import Dash, Input, Output, State, dcc, html, no_update
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import TEXT, line, scrolling
from dashboard.pages.frame import number
from dashboard.pages.sparkline import sparkline
from dashboard.queries.runs.table import ABSENT, curve, value_of
from dashboard.queries.verdict.rules import duration
from dashboard.read.model import Columns
from dashboard.read.runs import OverviewRow
from dashboard.read.tokens import shortened, visible
from millrace.runs.status import STAGES

TABLE = "overview"
"""The id of the block whose text is the table."""
_HEADS = {
    "run": "run",
    "state": "state",
    "step": "step",
    "reward": "reward of the last step",
    "accuracy": "accuracy",
    "staleness": "staleness, of bound",
    "started": "started",
    "hours": "took",
}
"""Field → what its column is called."""
_NUMBERS = ("step", "reward", "accuracy", "staleness", "hours")
_STATUS, _NOTE = "last status", "note"
_SUGGESTED = 8
_CELL_CHARACTERS, _KEY_CHARACTERS = 80, 60


def page(
    at: address.OverviewPage, differing: Sequence[str], keys: Sequence[str], table: Sequence[Component]
) -> Component:
    """The whole page. `keys` are all keys of the runs' configs, `differing` those that tell the runs apart."""
    hint = "word, state=running, training.learning_rate>1e-5"
    fields = [
        _field("filter", "filter, then Enter", at.filter, hint, 44),
        _field("column", "add a column, then Enter", "", "a key of the config", 28, options="runs-keys"),
        html.Datalist([html.Option(value=key) for key in keys], id="runs-keys"),
    ]
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
    tell = [html.Span("The runs differ in:", className="name"), *suggested] if suggested else []
    sentence = (
        "Tick runs to compare them; click a column's head to sort. The line is the smoothed reward of the whole run. "
        "The address holds all choices: copy it to share this view."
    )
    return html.Section(
        [
            html.P(sentence, className="sentence"),
            html.Div(fields, className="row trajectories"),
            html.Div([*chips, *tell], className="row choices"),
            html.Div(table, id={"type": TEXT, "block": TABLE}),
        ],
        className="block wide column",
    )


def register(app: Dash) -> None:
    """Adds the callback that puts what is typed into the address."""

    @app.callback(
        Output("address", "search"),
        Input("runs-filter", "value"),
        Input("runs-column", "value"),
        State("address", "search"),
        prevent_initial_call=True,
    )
    def choose(text: str | None, column: str | None, search: str | None) -> object:
        at = address.table_of(search or "")
        wanted = replace(at, filter=(text or "").strip(), columns=at.columns)
        if column and column.strip() not in at.columns:
            wanted = replace(wanted, columns=(*at.columns, column.strip()))
        return no_update if wanted == at else address.overview(wanted).removeprefix("/")


def table(
    at: address.OverviewPage, rows: Sequence[OverviewRow], curves: Mapping[str, Columns], num_runs: int, url: str
) -> list[Component]:
    """The table of `rows`, which are filtered and sorted; `num_runs` is how many there are at all."""
    if not num_runs:
        return [html.P(f"There is no run in {url} yet; this page keeps looking.", className="nowhere")]
    count = f"{num_runs} runs" if len(rows) == num_runs else f"{len(rows)} of {num_runs} runs"
    top = html.Div([_comparison(at.picked), html.Span("1 run" if count == "1 runs" else count)], className="row note")
    if not rows:
        everything = dcc.Link("Show all runs", href=address.overview(replace(at, filter="")))
        return [top, html.P([f"No run matches {visible(at.filter)}. ", everything], className="nowhere")]
    noted = any(row.note for row in rows)
    numeric = {key for key in at.columns if _is_numeric(rows, key)}
    running = any(row.state == "running" for row in rows)
    some = [name for name, has in ((_STATUS, running), (_NOTE, noted)) if has]
    heads = [
        html.Td(),
        *(_head(at, name, title, name in _NUMBERS) for name, title in _HEADS.items()),
        *(_head(at, key, visible(key), key in numeric) for key in at.columns),
        *(_head(at, "note", _NOTE, False) if name == _NOTE else html.Th(name, scope="col") for name in some),
    ]
    fixed = 1 + len(_HEADS)
    aligned = {i for i, name in enumerate(_HEADS, start=1) if name in _NUMBERS}
    aligned |= {fixed + i for i, key in enumerate(at.columns) if key in numeric}
    lines = [_line(at, row, curves.get(row.run_id), some, aligned, len(heads)) for row in rows]
    inside = [html.Table([html.Thead(html.Tr(heads)), html.Tbody(lines)], className="runs")]
    return [top, scrolling(inside, "runs")]


def _line(
    at: address.OverviewPage,
    row: OverviewRow,
    points: Columns | None,
    some: Sequence[str],
    aligned: Collection[int],
    columns: int,
) -> Component:
    name = dcc.Link(row.run_id, href=address.run(row.run_id))
    if row.problem is not None:
        problem = html.Td(visible(row.problem), colSpan=columns - 2, className="problem")
        return html.Tr([html.Td(), html.Td(name), problem])
    rare: Mapping[str, str | Component] = {
        _STATUS: _status(row),
        _NOTE: html.Span(visible(row.note), title=visible(row.note)),
    }
    cells: list[str | Component] = [
        _tick(at, row.run_id),
        name,
        html.Span(row.state, className=f"state {row.state}"),
        ABSENT if row.policy_version is None else f"{row.policy_version} of {row.max_steps}",
        _reward(row, points),
        ABSENT
        if row.accuracy is None
        else html.Span(f"{row.accuracy:.3f}", title=f"of version {row.accuracy_version}"),
        _staleness(row),
        ABSENT if row.t_started is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(row.t_started)),
        ABSENT if row.wall_seconds is None else duration(row.wall_seconds),
        *(shortened(visible(row.settings.get(key, ABSENT)), _CELL_CHARACTERS) for key in at.columns),
        *(rare[name] for name in some),
    ]
    return line(cells, aligned)


def _head(at: address.OverviewPage, name: str, title: str, is_number: bool) -> Component:
    """The head of a column: a link that sorts by it, or the other way round."""
    up, down = at.sort == name, at.sort == f"-{name}"
    # Of numbers, the largest are wanted first.
    wanted = f"-{name}" if up or (is_number and not down) else name
    return html.Th(
        dcc.Link(
            f"{shortened(title, _KEY_CHARACTERS)}{' ▲' if up else ' ▼' if down else ''}",
            href=address.overview(replace(at, sort=wanted)),
            title=f"sort by {title}",
            id={"type": "sort", "by": name},
        ),
        scope="col",
        className="number" if is_number else "",
        **{"aria-sort": "ascending" if up else "descending" if down else "none"},
    )


def _reward(row: OverviewRow, points: Columns | None) -> Component:
    name, drawn = curve(points, row.accuracies)
    return html.Span([sparkline(drawn, name), html.Span(number(row.reward_mean))], className="with-line")


def _staleness(row: OverviewRow) -> str | Component:
    if row.staleness_mean is None:
        return f"{ABSENT} of {row.max_staleness}"
    return html.Span(f"{row.staleness_mean:.2f} of {row.max_staleness}", title=f"largest: {row.staleness_max}")


def _status(row: OverviewRow) -> str | Component:
    """Of a run that goes on, the stage whose status is oldest; all of them where it can be pointed at."""
    if row.state != "running" or not row.ages:
        return ABSENT
    slowest = max(row.ages, key=lambda stage: row.ages[stage])
    every = ", ".join(f"{stage} {duration(row.ages[stage])}" for stage in STAGES if stage in row.ages)
    return html.Span(f"{slowest} {duration(row.ages[slowest])}", title=every, className="age")


def _tick(at: address.OverviewPage, run_id: str) -> Component:
    chosen = run_id in at.picked
    full = not chosen and len(at.picked) >= address.MAX_COMPARED
    others = tuple(other for other in at.picked if other != run_id)
    return dcc.Link(
        "☑" if chosen else "☐",
        href=address.overview(replace(at, picked=others if chosen or full else (*at.picked, run_id))),
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


def _field(name: str, label: str, value: str, hint: str, width: int, options: str | None = None) -> Component:
    typed = dcc.Input(
        id=f"runs-{name}",
        type="text",
        value=value,
        placeholder=hint,
        debounce=True,
        maxLength=address.MAX_CHARACTERS,
        **({} if options is None else {"list": options}),
    )
    style = {"flexBasis": f"{width}em"}
    return html.Label([html.Span(label, className="name"), typed], className="field", style=style)
