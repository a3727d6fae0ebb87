"""The addresses of the pages.

/                                  the table of all runs; ?runs=a,b: those picked for comparison; filter=…, sort=…:
                                   see `dashboard.queries.runs.table`; column=…, repeated: keys of the config
/run/<run id>/<view>               one view of one run; without a view, the first
/compare/<view>?runs=a,b           one view of several runs; without a view, the first
anything else                      not found, with a sentence that says why

A view's address may say how its charts are shown: smooth=10 for means of ten policy versions, x=time for wall time.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlencode

from dashboard.views.display import PLAIN, SMOOTHINGS, Display

TRAJECTORIES = "trajectories"
"""The view whose address holds a query."""
MAX_COMPARED = 8
DEFAULT_SORT = "-started"
MAX_COLUMNS = 12
MAX_CHARACTERS = 200
"""Of a filter, and of the name of a column."""
_MAX_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class OverviewPage:
    """All runs."""

    picked: tuple[str, ...] = ()
    """Run ids ticked for comparison, in the order of the ticks."""
    columns: tuple[str, ...] = ()
    """Keys of the config that the table has a column for."""
    filter: str = ""
    sort: str = DEFAULT_SORT
    """A field or a key; downwards after a `-`."""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """One view of one run, or of several side by side."""

    run_ids: tuple[str, ...]
    view: str
    compared: bool
    display: Display = PLAIN


@dataclass(frozen=True, kw_only=True)
class NotFound:
    """There is no such page."""

    sentence: str


Address = OverviewPage | RunPage | NotFound


def parse(path: str, search: str, run_ids: Collection[str], views: Sequence[str]) -> Address:
    """The page at `path` and `search` (with its `?`), given the existing runs and, in order, views.

    Only ids in `run_ids` are accepted, so no address reaches any other folder.
    """
    values = parse_qs(search.removeprefix("?"))
    picked = table_of(search).picked
    match path.strip("/").split("/"):
        case [""]:
            existing = tuple(run_id for run_id in picked if run_id in run_ids)[:MAX_COMPARED]
            return replace(table_of(search), picked=existing)
        case ["run", run_id, *rest] if len(rest) <= 1:
            return _shown_as(values, _runs((run_id,), rest, run_ids, views, compared=False))
        case ["compare", *rest] if len(rest) <= 1:
            if not 1 <= len(picked) <= MAX_COMPARED:
                return NotFound(sentence=f"Name 1 to {MAX_COMPARED} runs to compare, as in /compare?runs=first,second.")
            return _shown_as(values, _runs(picked, rest, run_ids, views, compared=True))
    return NotFound(sentence=f"There is no page {_shown(path)}.")


def table_of(search: str) -> OverviewPage:
    """The table that `search` (with its `?`) describes; the runs picked may not exist."""
    values = parse_qs(search.removeprefix("?"))
    picked = dict.fromkeys(filter(None, values.get("runs", [""])[0].split(",")))
    columns = dict.fromkeys(key[:MAX_CHARACTERS] for key in values.get("column", []))
    return OverviewPage(
        picked=tuple(picked),
        columns=tuple(columns)[:MAX_COLUMNS],
        filter=values.get("filter", [""])[0][:MAX_CHARACTERS],
        sort=values.get("sort", [DEFAULT_SORT])[0][:MAX_CHARACTERS],
    )


def overview(at: OverviewPage | None = None) -> str:
    """The address of the table of all runs; what is as by default is left out."""
    if at is None:
        return "/"
    values = [
        *([("runs", ",".join(at.picked))] if at.picked else []),
        *([("filter", at.filter)] if at.filter else []),
        *([("sort", at.sort)] if at.sort != DEFAULT_SORT else []),
        *(("column", key) for key in at.columns),
    ]
    return f"/?{urlencode(values, safe=',')}" if values else "/"


def run(run_id: str, view: str = "", display: Display = PLAIN) -> str:
    """The address of one view of a run; by default the first."""
    chosen = _typed(display)
    return f"/run/{run_id}{'/' if view else ''}{view}{'?' if chosen else ''}{chosen}"


def compare(run_ids: Sequence[str], view: str = "", display: Display = PLAIN) -> str:
    """The address of one view of several runs; by default the first."""
    chosen = _typed(display)
    return f"/compare{'/' if view else ''}{view}?runs={','.join(run_ids)}{'&' if chosen else ''}{chosen}"


def shown_as(at: RunPage, display: Display) -> str:
    """The address of the same page with its charts shown in another way."""
    if at.compared:
        return compare(at.run_ids, at.view, display)
    return run(at.run_ids[0], at.view, display)


def _runs(
    chosen: tuple[str, ...], rest: Sequence[str], run_ids: Collection[str], views: Sequence[str], *, compared: bool
) -> RunPage | NotFound:
    for run_id in chosen:
        if run_id not in run_ids:
            return NotFound(sentence=f"There is no run {_shown(run_id)} here.")
    view = rest[0] if rest and rest[0] else views[0]
    if view not in views:
        return NotFound(sentence=f"A run has no page {_shown(view)}: there are {', '.join(views)}.")
    return RunPage(run_ids=chosen, view=view, compared=compared)


def _typed(display: Display) -> str:
    """The parameters of an address that `_shown_as` reads; those that have their default are left out."""
    values = {"smooth": str(display.smoothing)} if display.smoothing != PLAIN.smoothing else {}
    return urlencode(values | ({"x": "time"} if display.by_time else {}))


def _shown_as(values: Mapping[str, Sequence[str]], at: RunPage | NotFound) -> Address:
    smoothing, x = values.get("smooth", ["1"])[0], values.get("x", ["version"])[0]
    if isinstance(at, NotFound) or at.view == TRAJECTORIES:
        return at
    if smoothing not in map(str, SMOOTHINGS):
        return NotFound(sentence=f"smooth is {_shown(smoothing)}: expected one of {', '.join(map(str, SMOOTHINGS))}.")
    if x not in ("version", "time"):
        return NotFound(sentence=f"x is {_shown(x)}: expected version or time.")
    return replace(at, display=Display(smoothing=int(smoothing), by_time=x == "time"))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
