"""The addresses of the pages.

/                                  the overview of all runs; ?runs=a,b: those picked for comparison
/run/<run id>/<view>               one view of one run; without a view, the first
/compare/<view>?runs=a,b           one view of several runs; without a view, the first
anything else                      not found, with a sentence that says why
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from urllib.parse import parse_qs

MAX_COMPARED = 8
_MAX_SHOWN = 80


@dataclass(frozen=True, kw_only=True)
class OverviewPage:
    """All runs."""

    picked: tuple[str, ...] = ()
    """Run ids ticked for comparison, in the order of the ticks."""


@dataclass(frozen=True, kw_only=True)
class RunPage:
    """One view of one run, or of several side by side."""

    run_ids: tuple[str, ...]
    view: str
    compared: bool


@dataclass(frozen=True, kw_only=True)
class NotFound:
    """There is no such page."""

    sentence: str


Address = OverviewPage | RunPage | NotFound


def parse(path: str, search: str, run_ids: Collection[str], views: Sequence[str]) -> Address:
    """The page at `path` and `search` (with its `?`), given the existing runs and, in order, views.

    Only ids in `run_ids` are accepted, so no address reaches any other folder.
    """
    picked = tuple(dict.fromkeys(parse_qs(search.removeprefix("?")).get("runs", [""])[0].split(",")))
    picked = tuple(filter(None, picked))
    match path.strip("/").split("/"):
        case [""]:
            return OverviewPage(picked=tuple(run_id for run_id in picked if run_id in run_ids)[:MAX_COMPARED])
        case ["run", run_id, *rest] if len(rest) <= 1:
            return _runs((run_id,), rest, run_ids, views, compared=False)
        case ["compare", *rest] if len(rest) <= 1:
            if not 1 <= len(picked) <= MAX_COMPARED:
                return NotFound(sentence=f"Name 1 to {MAX_COMPARED} runs to compare, as in /compare?runs=first,second.")
            return _runs(picked, rest, run_ids, views, compared=True)
    return NotFound(sentence=f"There is no page {_shown(path)}.")


def overview(picked: Sequence[str] = ()) -> str:
    return f"/?runs={','.join(picked)}" if picked else "/"


def run(run_id: str, view: str = "") -> str:
    """The address of one view of a run; by default the first."""
    return f"/run/{run_id}/{view}" if view else f"/run/{run_id}"


def compare(run_ids: Sequence[str], view: str = "") -> str:
    """The address of one view of several runs; by default the first."""
    return f"/compare{'/' if view else ''}{view}?runs={','.join(run_ids)}"


def _runs(
    chosen: tuple[str, ...], rest: Sequence[str], run_ids: Collection[str], views: Sequence[str], *, compared: bool
) -> Address:
    for run_id in chosen:
        if run_id not in run_ids:
            return NotFound(sentence=f"There is no run {_shown(run_id)} here.")
    view = rest[0] if rest and rest[0] else views[0]
    if view not in views:
        return NotFound(sentence=f"A run has no page {_shown(view)}: there are {', '.join(views)}.")
    return RunPage(run_ids=chosen, view=view, compared=compared)


def _shown(text: str) -> str:
    return repr(text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + "…")
