"""`millrace runs`: a table of the runs below a root, newest first."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flows.display.progress import duration
from flows.display.terminal import local_time, new_table, plain

if TYPE_CHECKING:
    from dashboard.read.runs import OverviewRow

_UNKNOWN = "–"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    what = "list the runs below a folder or URL, the one started last first"
    parser = commands.add_parser("runs", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("url", nargs="?", default="runs", metavar="URL", help="(default: runs)")


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Prints the table; returns the exit code. Raises InputError and StorageError for a URL that can hold no runs."""
    from dashboard.read.runs import Runs

    console = console or Console()
    runs = Runs(arguments.url)
    rows = runs.overview()
    if not rows:
        console.print(plain(f"There is no run in {runs.url}."))
        return 0
    console.print(table(f"runs in {runs.url}", rows))
    for row in rows:
        for sentence in [row.problem] if row.problem is not None else row.missing:
            console.print(plain(f"{row.run_id}: {sentence}"), soft_wrap=True)
    return 0


def table(title: str, rows: Sequence["OverviewRow"]) -> Table:
    """A line per run, those that can't be read last. Start and duration are the newest attempt's."""
    made = new_table(title, left=("run", "state"), right=("version", "accuracy", "started", "took"))
    # So that run ids as they are made fit into 80 columns.
    made.padding = 0
    for row in sorted(rows, key=lambda row: -(row.t_started or 0.0)):
        made.add_row(*map(plain, _cells(row)))
    return made


def _cells(row: "OverviewRow") -> list[str]:
    if row.problem is not None:
        return [row.run_id, *[_UNKNOWN] * 5]
    return [
        row.run_id,
        row.state or _UNKNOWN,
        f"{_UNKNOWN if row.policy_version is None else row.policy_version}/{row.max_steps}",
        _UNKNOWN if row.accuracy is None else f"{row.accuracy:.3f} v{row.accuracy_version}",
        _UNKNOWN if row.t_started is None else local_time(row.t_started).rpartition(":")[0],
        _UNKNOWN if row.wall_seconds is None else duration(row.wall_seconds),
    ]
