"""The page at an address and its updates, without Dash's callbacks.

address ─► parse ─► read its runs ─► show: frame and body
                                 └─► refresh: the frame; after a change, every figure and text; or `again`
"""

import json
import logging
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import plotly.graph_objects as go
from dash import dcc, html, no_update
from dash.development.base_component import Component

from dashboard.pages import address, evaluation, overview, rail
from dashboard.pages import trajectories as trajectories_page
from dashboard.pages.draw import checksum, draw, reason, redraw, sums, table
from dashboard.pages.frame import frame
from dashboard.queries import run_table
from dashboard.queries.stragglers import in_flight
from dashboard.read.model import OverviewRow, RunData
from dashboard.read.runs import Runs
from dashboard.views import evaluation as evaluation_view
from dashboard.views import flow, learning, ledger, record, staleness
from dashboard.views.blocks import Block, Rows, View
from dashboard.views.comparison import COMPARISON
from dashboard.views.display import displayed
from dashboard.views.home import HOME
from millrace.errors import MillraceError
from storage.errors import StorageError

_JUST_NOW_SECONDS = 0.2
_LOGGER = logging.getLogger(__name__)

VIEWS: tuple[View, ...] = (
    staleness.VIEW, flow.VIEW, learning.VIEW, evaluation_view.VIEW, ledger.VIEW, record.VIEW,
)  # fmt: skip
TRAJECTORIES = View(
    name=address.TRAJECTORIES,
    title="Trajectories",
    sentence="Search and read every group that the trainer took: prompts, responses, rewards and versions.",
    blocks=(),
)


@dataclass(frozen=True, kw_only=True)
class Shown:
    """A complete page."""

    frame: Sequence[Component]
    body: Component
    drawn_from: Mapping[str, Any]
    """JSON that the browser stores until the next refresh."""


@dataclass(frozen=True, kw_only=True)
class Refreshed:
    """The update of a page; unchanged parts are `no_update`."""

    frame: Sequence[Component]
    figures: Sequence[Any]
    texts: Sequence[Any]
    drawn_from: Mapping[str, Any] = field(default_factory=dict)
    """The entries of `Shown.drawn_from` that have changed."""
    again: bool = False
    """The whole page has to be redrawn."""


@dataclass(frozen=True, kw_only=True)
class _Look:
    """The data of the page at an address."""

    at: address.Address
    runs: Sequence[RunData] = ()
    """Readable runs of the page."""
    rows: Sequence[OverviewRow] = ()
    problems: Sequence[str] = ()


class Site:
    """Draws the pages of `runs`."""

    def __init__(self, runs: Runs) -> None:
        self._runs = runs

    def at(self, path: str, search: str) -> address.Address:
        """Parses the address. Raises StorageError if the runs can't be listed."""
        views = [view.name for view in _offered(path.strip("/").split("/")[0] == "compare")]
        at = address.parse(path, search, self._runs.ids(), views)
        if isinstance(at, address.NotFound):
            # The run may have just been created.
            at = address.parse(path, search, self._runs.ids(within=_JUST_NOW_SECONDS), views)
        return at

    def read(self, path: str, search: str) -> None:
        """Reads the runs of a page in advance, so that drawing it soon after only has to read new data."""
        self._look(path, search)

    def show(self, path: str, search: str) -> Shown:
        try:
            look = self._look(path, search)
            return self._shown(path, look, self._built(look))
        except Exception as error:  # The other pages can still be read, and this one draws itself once it can.
            _LOGGER.exception("the page %s can't be drawn", path)
            sentence = f"This page can't be drawn: {reason(error)}"
            return self._shown(path, _Look(at=address.NotFound(sentence=sentence)), {})

    def _shown(self, path: str, look: "_Look", built: Mapping[str, go.Figure | Rows]) -> Shown:
        drawn_from = {**_drawn_from(path, look), "blocks": [*built], "figures": _sums(built)}
        return Shown(frame=self._frame(look), body=self._body(look, built), drawn_from=drawn_from)

    def refresh(
        self, path: str, search: str, drawn_from: Mapping[str, Any], charts: Sequence[str], texts: Sequence[str]
    ) -> Refreshed:
        """Returns the update of the page that `show` drew at `path`; `charts` and `texts` are the ids of its blocks."""
        look = self._look(path, search)
        now = _drawn_from(path, look)
        rest = Refreshed(frame=self._frame(look), figures=[no_update] * len(charts), texts=[no_update] * len(texts))
        if isinstance(look.at, address.NotFound):
            return rest
        changed = any(now[name] != drawn_from.get(name) for name in ("page", "evaluated"))
        if changed or not set(now["runs"]) <= set(drawn_from["runs"]):
            return replace(rest, again=True)
        if isinstance(look.at, address.OverviewPage):
            rows = self._table(look.at, look.rows)
            if now.items() <= drawn_from.items() and drawn_from.get("table") == checksum(rows):
                return rest
            return replace(rest, texts=[rows for _ in texts], drawn_from={"table": checksum(rows)})
        # A late update of the page before may have left the sums of its own figures.
        is_of_this_page = drawn_from["figures"].keys() == set(drawn_from["blocks"])
        # A run that can't be read now stays as it was last drawn.
        if (is_of_this_page and now.items() <= drawn_from.items()) or len(look.runs) < len(drawn_from["runs"]):
            return rest
        built = self._built(look)
        if drawn_from["blocks"] != [*built]:
            return replace(rest, again=True)
        drawn = drawn_from["figures"]
        figures = {name: redraw(new, drawn.get(name, {})) for name, new in built.items() if isinstance(new, go.Figure)}
        now_drawn = _sums(built)
        tables = {
            name: table(new)
            for name, new in built.items()
            if isinstance(new, Rows) and drawn.get(name) != now_drawn[name]
        }
        tables[rail.SEEN] = [str(now["seen"])]
        return replace(
            rest,
            figures=[figures.get(block, no_update) for block in charts],
            texts=[tables.get(block, no_update) for block in texts],
            drawn_from={"seen": now["seen"], "figures": now_drawn},
        )

    def is_not_found(self, path: str, search: str) -> bool:
        """Whether the page does not exist; False if the runs can't be listed."""
        try:
            return isinstance(self.at(path, search), address.NotFound)
        except StorageError:
            return False

    def _look(self, path: str, search: str) -> _Look:
        try:
            at = self.at(path, search)
            if isinstance(at, address.OverviewPage):
                return _Look(at=at, rows=self._runs.overview())
        except (MillraceError, StorageError) as error:
            return _Look(at=address.NotFound(sentence=str(error)), problems=[str(error)])
        runs, problems = list[RunData](), list[str]()
        for run_id in at.run_ids if isinstance(at, address.RunPage) else ():
            try:
                runs.append(self._runs.reader(run_id).look())
            except KeyError:
                problems.append(f"{run_id}: the run was removed")
            except (MillraceError, StorageError) as error:
                problems.append(f"{run_id}: {error}")
        return _Look(at=at, runs=runs, problems=problems)

    def _frame(self, look: _Look) -> list[Component]:
        compared = isinstance(look.at, address.RunPage) and look.at.compared
        return frame(look.at, look.runs, look.problems, _offered(compared), self._runs.url)

    def _built(self, look: _Look) -> dict[str, go.Figure | Rows]:
        """Builds the content of every block of the page's view, by id."""
        if not look.runs or not isinstance(look.at, address.RunPage):
            return {}
        view, display = _view(look.at), look.at.display
        display = replace(display, smoothing=1) if view.is_smooth else display
        built = {block.id: block.build(look.runs) for block in view.blocks_for(look.runs)}
        return {
            name: displayed(content, display, look.runs) if isinstance(content, go.Figure) else content
            for name, content in built.items()
        }

    def _table(self, at: address.OverviewPage, rows: Sequence[OverviewRow]) -> list[Component]:
        newest_first = run_table.ordered(run_table.chosen(rows, at.filter, at.columns), "-started")
        shown = run_table.ordered(newest_first, at.sort)
        if not rows:
            return overview.empty(self._runs.url, is_missing=self._runs.is_missing)
        return overview.table(at, shown, rows)

    def _body(self, look: _Look, built: Mapping[str, go.Figure | Rows]) -> Component:
        match look.at:
            case address.NotFound(sentence=sentence):
                home = dcc.Link("All runs", href=address.overview())
                return html.Div([html.P(sentence), home], className="nowhere")
            case address.OverviewPage() as at:
                readable = [row.settings for row in look.rows if row.problem is None]
                keys = sorted(set().union(*readable))
                return overview.page(at, run_table.differing(readable), keys, self._table(at, look.rows))
            case address.RunPage() as at:
                if not look.runs:
                    return html.P("Nothing can be shown yet; this page keeps looking.", className="nowhere")
                view = _view(at)
                if view is TRAJECTORIES:
                    page = trajectories_page.layout(at.run_ids[0], is_mixture=bool(look.runs[0].by_source))
                    return html.Div(page, className="trajectories")
                if view.name == evaluation_view.NAME:
                    choice = [] if at.compared else [evaluation.choice(at, look.runs[0])]
                    return html.Div([html.P(view.sentence, className="sentence"), *choice, _grid(view.blocks, built)])
                blocks = [block for block in view.blocks if block.id in built]
                key = [block for block in blocks[: view.num_key] if not _is_empty(built[block.id])]
                rest = [block for block in blocks if block not in key]
                if view is HOME:
                    return html.Div(
                        [_grid(blocks, built), rail.place(at.run_ids[0], [_seen(run) for run in look.runs])],
                        className="home",
                    )
                more = f"{len(rest)} more" if len(rest) > 1 else rest[0].title if rest else ""
                folded = [html.Details([html.Summary(more), _grid(rest, built)], className="more")] if rest else []
                return html.Div([html.P(view.sentence, className="sentence"), _grid(key, built), *folded])


def _offered(compared: bool) -> Sequence[View]:
    return (COMPARISON, *VIEWS) if compared else (HOME, *VIEWS, TRAJECTORIES)


def _view(at: address.RunPage) -> View:
    if at.view == evaluation_view.NAME:
        return evaluation_view.view(at.display)
    return next(view for view in _offered(at.compared) if view.name == at.view)


def _grid(blocks: Sequence[Block], built: Mapping[str, go.Figure | Rows]) -> Component:
    return html.Div([draw(block, built[block.id]) for block in blocks], className="grid")


def _is_empty(content: go.Figure | Rows) -> bool:
    return not content.data if isinstance(content, go.Figure) else not content.rows


def _drawn_from(path: str, look: _Look) -> dict[str, Any]:
    """Returns the page, its runs, and a checksum of the data that blocks may show."""
    return {
        "path": path,
        "page": type(look.at).__name__,
        "evaluated": _evaluated(look),
        "runs": [run.info.run_id for run in look.runs],
        "seen": [_seen(run) for run in look.runs],
    }


def _evaluated(look: _Look) -> list[int]:
    """Returns how many versions of each run can be chosen on the page."""
    if not isinstance(look.at, address.RunPage) or look.at.view != evaluation_view.NAME:
        return []
    return [len(run.evaluations["policy_version"]) for run in look.runs]


def _sums(built: Mapping[str, go.Figure | Rows]) -> dict[str, dict[str, int]]:
    return {name: sums(new) if isinstance(new, go.Figure) else {"": _sum_of(new)} for name, new in built.items()}


def _sum_of(rows: Rows) -> int:
    return zlib.crc32(repr(rows).encode("utf-8", "backslashreplace"))


def _seen(run: RunData) -> int:
    times = run.recent["t"]
    status = run.status or {}
    state = [
        len(run.info.attempts),
        [attempt.end is not None for attempt in run.info.attempts],
        len(times),
        float(times[-1]) if len(times) else None,
        {stage: {name: len(rows["t"]) for name, rows in names.items()} for stage, names in run.metrics.items()},
        len(run.evaluations["policy_version"]),
        [(work.requests, work.groups, work.tokens, work.versions) for work in in_flight(run)],
        [status.get(name) for name in ("state", "steps", "ledger")],
        [*run.latest("incidents"), *run.latest("decisions")],
        run.problems,
    ]
    return zlib.crc32(json.dumps(state, sort_keys=True).encode())
