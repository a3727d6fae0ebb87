"""The addresses of the pages.

/                                  the table of all runs; ?runs=a,b: runs picked for comparison; filter=…, sort=…:
                                   see `dashboard.queries.run_table`; column=…, repeated: keys of the config
/run/<run id>/<view>               one view of one run, by default the first
/compare/<view>?runs=a,b           one view of several runs, by default the first
anything else                      not found, with the reason

A view's address may contain options: smooth=25 for means of 25 policy versions, x=time for wall time, before=0 and
after=20 for the versions that the page of evaluations compares.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from urllib.parse import parse_qs, urlencode

from dashboard.views.display import DEFAULT, SMOOTHINGS, Display

TRAJECTORIES = "trajectories"
"""Name of the view whose address contains a query."""
MAX_COMPARED = 8
DEFAULT_SORT = "-attention"
MAX_COLUMNS = 12
MAX_CHARACTERS = 200
"""Limit for a filter and for the name of a column."""
_MAX_SHOWN = 80
_VERSIONS = ("before", "after")
_MAX_DIGITS = 12


@dataclass(frozen=True, kw_only=True)
class OverviewPage:
    """All runs."""

    picked: tuple[str, ...] = ()
    """Ids of the runs picked for comparison, in the order in which they were picked."""
    columns: tuple[str, ...] = ()
    """Config keys with a column."""
    filter: str = ""
    sort: str = DEFAULT_SORT
    """Field or key; descending after a `-`."""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """One view of one run, or of several side by side."""

    run_ids: tuple[str, ...]
    view: str
    compared: bool
    display: Display = DEFAULT


@dataclass(frozen=True, kw_only=True)
class NotFound:
    """The page does not exist."""

    sentence: str


Address = OverviewPage | RunPage | NotFound


def parse(path: str, search: str, run_ids: Collection[str], views: Sequence[str]) -> Address:
    """Parses `path` and `search` (with its `?`); `run_ids` and `views` exist, the first view is the default.

    Only ids in `run_ids` are accepted, so no address reaches another folder.
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
    return NotFound(sentence=f"The page {_shown(path)} does not exist.")


def table_of(search: str) -> OverviewPage:
    """Parses the address of the table of all runs; the picked runs may not exist."""
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
    """Returns the address of the table of all runs, without default values."""
    if at is None:
        return "/"
    values = [
        *([("runs", ",".join(at.picked))] if at.picked else []),
        *([("filter", at.filter)] if at.filter else []),
        *([("sort", at.sort)] if at.sort != DEFAULT_SORT else []),
        *(("column", key) for key in at.columns),
    ]
    return f"/?{urlencode(values, safe=',')}" if values else "/"


def run(run_id: str, view: str = "", display: Display = DEFAULT) -> str:
    """Returns the address of a view of a run; by default the first."""
    chosen = _typed(display)
    return f"/run/{run_id}{'/' if view else ''}{view}{'?' if chosen else ''}{chosen}"


def compare(run_ids: Sequence[str], view: str = "", display: Display = DEFAULT) -> str:
    """Returns the address of a view of several runs; by default the first."""
    chosen = _typed(display)
    return f"/compare{'/' if view else ''}{view}?runs={','.join(run_ids)}{'&' if chosen else ''}{chosen}"


def shown_as(at: RunPage, display: Display) -> str:
    """Returns the address of the same page with other chart options."""
    if at.compared:
        return compare(at.run_ids, at.view, display)
    return run(at.run_ids[0], at.view, display)


def _runs(
    chosen: tuple[str, ...], rest: Sequence[str], run_ids: Collection[str], views: Sequence[str], *, compared: bool
) -> RunPage | NotFound:
    for run_id in chosen:
        if run_id not in run_ids:
            return NotFound(sentence=f"The run {_shown(run_id)} does not exist here.")
    view = rest[0] if rest and rest[0] else views[0]
    if view not in views:
        return NotFound(sentence=f"A run has no page {_shown(view)}, only {', '.join(views)}.")
    return RunPage(run_ids=chosen, view=view, compared=compared)


def _typed(display: Display) -> str:
    """Returns the options that differ from their defaults as query parameters."""
    values = {"smooth": str(display.smoothing)} if display.smoothing != DEFAULT.smoothing else {}
    values |= {"x": "time"} if display.by_time else {}
    chosen = {name: getattr(display, name) for name in _VERSIONS}
    return urlencode(values | {name: str(version) for name, version in chosen.items() if version is not None})


def _shown_as(values: Mapping[str, Sequence[str]], at: RunPage | NotFound) -> Address:
    smoothing, x = values.get("smooth", [str(DEFAULT.smoothing)])[0], values.get("x", ["version"])[0]
    if isinstance(at, NotFound) or at.view == TRAJECTORIES:
        return at
    if smoothing not in map(str, SMOOTHINGS):
        return NotFound(sentence=f"smooth is {_shown(smoothing)}: expected one of {', '.join(map(str, SMOOTHINGS))}.")
    if x not in ("version", "time"):
        return NotFound(sentence=f"x is {_shown(x)}: expected version or time.")
    chosen = {name: values[name][0] for name in _VERSIONS if name in values}
    for name, version in chosen.items():
        if not version.isdecimal() or len(version) > _MAX_DIGITS:
            return NotFound(sentence=f"{name} is {_shown(version)}: expected a policy version.")
    pair = {name: int(version) for name, version in chosen.items()}
    return replace(at, display=Display(smoothing=int(smoothing), by_time=x == "time", **pair))


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
