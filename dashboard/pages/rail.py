"""The rail next to a home page's charts: notable groups, latest events, ledger, Prefect and config.

Site: `place` in the body ─► page ─► callback ─► `rail`, with prompts read from the store ─► page

The rail has a separate request, so that the charts do not wait for prompts from the generators' streams. All text from
models and runs is shown as children of elements, never as markup.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from dash import Dash, Input, Output, State, dcc, html
from dash.development.base_component import Component

from dashboard.pages import address
from dashboard.pages.draw import TEXT
from dashboard.queries.events import RunEvent, latest_events
from dashboard.queries.run_table import predecessors
from dashboard.read import search
from dashboard.read.model import RunData
from dashboard.read.run_reader import RunReader
from dashboard.read.runs import Runs
from dashboard.read.tokens import visible
from dashboard.views.ledger import is_balanced
from dashboard.views.record import VIEW as RECORD
from millrace.errors import MillraceError
from millrace.runtime.metrics import RECENT_STEPS
from storage.errors import StorageError

SEEN = "rail-seen"
"""Id of the block with a checksum of the run; when it changes, the rail is redrawn."""
_EVENTS, _CHANGES = 3, 3
_PROMPT, _WORDS, _VALUE = 48, 300, 24
"""Maximum numbers of characters."""

Prompts = Mapping[tuple[int, int], str]
"""(generator, row of a group's first trajectory) → prompt."""


class NotableGroup(NamedTuple):
    """A group worth reading first."""

    why: str
    """best, worst or no spread."""
    row: tuple[int, int]
    """Generator, and row of the group's first trajectory."""
    policy_version: int
    """Version made by the step that took the group."""
    reward: float
    """Mean of the known rewards."""


def notable_groups(run: RunData) -> Sequence[NotableGroup]:
    """Returns the groups of the newest ten versions with the highest and the lowest mean reward, and one in which all
    rewards are equal, if they exist; of several, the newest."""
    recent = run.recent
    versions = recent["policy_version"]
    first = int(np.searchsorted(versions, versions[-1] - RECENT_STEPS, side="right")) if len(versions) else 0
    rows = {name: column[first:] for name, column in recent.items()}
    starts = np.flatnonzero(rows["sample_index"] == 0)
    if not len(starts):
        return []
    means, counts = search.mean_rewards(rows["reward"], starts)
    highest, lowest = (extreme.reduceat(rows["reward"], starts) for extreme in (np.fmax, np.fmin))
    notable = {
        "best": _last(np.where(counts > 0, means, -np.inf)),
        "worst": _last(np.where(counts > 0, -means, -np.inf)),
        "no spread": _last(np.where((counts > 1) & (highest == lowest), 0.0, -np.inf)),
    }
    return [
        NotableGroup(
            why,
            (int(rows["generator"][starts[index]]), int(rows["trajectory_row_id"][starts[index]])),
            int(rows["policy_version"][starts[index]]),
            float(means[index]),
        )
        for why, index in notable.items()
        if index is not None
    ]


def _last(values: npt.NDArray[np.float64]) -> int | None:
    """Returns the last index of the maximum; None if the maximum is −∞."""
    largest = values.max()
    return int(np.flatnonzero(values == largest)[-1]) if np.isfinite(largest) else None


def place(run_id: str, seen: Sequence[int]) -> Component:
    """Draws a placeholder that the callback replaces with the rail."""
    return html.Aside(
        [
            dcc.Store(id="rail-run", data=run_id),
            html.Span(str(seen), id={"type": TEXT, "block": SEEN}, hidden=True),
            html.Div("Loading…", id="rail", className="rail"),
        ],
        **{"aria-label": "groups, events, ledger and config"},
    )


def register(app: Dash, runs: Runs) -> None:
    """Adds the callback that draws the rail."""

    @app.callback(
        Output("rail", "children"), Input({"type": TEXT, "block": SEEN}, "children"), State("rail-run", "data")
    )
    def show(seen: str, run_id: str) -> list[Component]:
        try:
            reader = runs.reader(run_id)
            run, before = reader.look(), predecessors(runs.overview()).get(run_id)
        except (KeyError, StorageError, MillraceError, OSError):
            # The top of the page shows the error.
            return []
        return rail(run, _prompts(run, reader), None if before is None else before.run_id)


def rail(run: RunData, prompts: Prompts, predecessor: str | None = None) -> list[Component]:
    """Draws all sections; `predecessor` is the run to compare with."""
    comparison = []
    if predecessor is not None:
        href = address.compare([run.info.run_id, predecessor])
        comparison = [html.P(dcc.Link(f"Compare with {predecessor}, the run before it with this task", href=href))]
    return [
        _section("Groups", _groups(run, prompts)),
        _section("Events", _events(latest_events(run, _EVENTS))),
        _section("Ledger", _ledger(run)),
        _section("Config", [*_config(run), *comparison]),
        _section("Prefect", _prefect(run)),
    ]


def _prompts(run: RunData, run_reader: RunReader) -> Prompts:
    rows = [group.row for group in notable_groups(run)]
    try:
        reader, texts = run_reader.groups()
        return {row: texts.text(tokens) for row, (_, tokens) in reader.prompts(rows).items()}
    except (KeyError, TypeError, StorageError, MillraceError, OSError):
        # With a malformed config or stream, the groups are shown without their prompts.
        return {}


def _section(title: str, lines: Sequence[Component]) -> Component:
    return html.Section([html.H2(title), *lines], className="rail-section")


def _groups(run: RunData, prompts: Prompts) -> list[Component]:
    items = [_group(run, group, prompts.get(group.row)) for group in notable_groups(run)]
    return [html.Ul(items)] if items else [_nothing("None was taken yet.")]


def _group(run: RunData, group: NotableGroup, prompt: str | None) -> Component:
    query = search.Query(open=group.row)
    href = address.run(run.info.run_id, "trajectories") + search.address(query)
    text = "its prompt can't be read" if prompt is None else _short(" ".join(prompt.split()), _PROMPT)
    facts = f"reward {group.reward:.2g}, v{group.policy_version}"
    return html.Li([dcc.Link(group.why, href=href), f" {text} ", html.Span(facts, className="none")])


def _events(events: Sequence[RunEvent]) -> list[Component]:
    lines = [
        html.Li([html.Strong(event.kind), f" v{event.policy_version}: {words}"], title=words)
        for event in events
        for words in [_short(event.words, _WORDS)]
    ]
    return [html.Ul(lines)] if lines else [_nothing("None.")]


def _ledger(run: RunData) -> list[Component]:
    if run.status is None:
        return [_nothing("It can't be computed: see the top of the page.")]
    ledger = run.status["ledger"]
    level, word = ("good", "✓ balanced") if is_balanced(ledger) else ("bad", "✕ not balanced")
    generated, trained, buffered, in_flight = (
        ledger[name]["rollouts"] for name in ("generated", "trained", "buffered", "in_flight")
    )
    dropped = sum(amount["rollouts"] for amount in ledger["dropped"].values())
    words = f"{generated:,} generated = {trained:,} trained + {buffered + in_flight:,} waiting + {dropped:,} dropped"
    return [html.P([html.Span(word, className=f"verdict {level}"), f" {words}"])]


def _config(run: RunData) -> list[Component]:
    origin = run.info.attempts[-1].origin
    record = dcc.Link("Whole config and logs", href=address.run(run.info.run_id, RECORD.name))
    if origin.preset is None:
        return [_nothing("The preset was not recorded in this run."), html.P(record)]
    preset = f"{_short(origin.preset, _PROMPT)}{' under millrace sft' if run.info.is_supervised else ''}"
    if not origin.changes:
        return [html.P([f"As preset {preset}. ", record])]
    lines = [html.Li(_change(key, pair)) for key, pair in list(origin.changes.items())[:_CHANGES]]
    more = len(origin.changes) - _CHANGES
    rest = [html.Span(f"and {more} more. ", className="none")] if more > 0 else []
    return [html.P(f"Against preset {preset}:"), html.Ul(lines), html.P([*rest, record])]


def _change(key: str, pair: Sequence[Any]) -> str:
    old, new = (_short(json.dumps(value), _VALUE) for value in pair)
    return f"{_short(key, _PROMPT)}: {old} → {new}"


def _prefect(run: RunData) -> list[Component]:
    link = run.info.attempts[-1].origin.flow_run
    # A run's record may contain anything, even an address that runs a script.
    if link is None or not link.startswith(("http://", "https://")):
        return [_nothing("No flow run was recorded.")]
    return [html.P(html.A("The flow run in Prefect", href=link, rel="noreferrer"))]


def _nothing(sentence: str) -> Component:
    return html.P(sentence, className="none")


def _short(text: str, most: int) -> str:
    """Escapes and truncates text of a run or a model."""
    return visible(text if len(text) <= most else f"{text[:most]}…")
