"""`millrace runs`, `status` and `note`: a table of runs, the state of one, and a person's note on it."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from flows.display.progress import duration
from flows.display.terminal import local_time, new_table, plain

if TYPE_CHECKING:
    from dashboard.read.runs import OverviewRow

_UNKNOWN = "–"


def add_status(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `status`."""
    status = commands.add_parser("status", help="show the state of a run")
    status.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    status.add_argument("--json", action="store_true", help="everything, as JSON")


def add_parsers(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands `runs` and `note`."""
    what = "list the runs below a folder or URL, the one started last first"
    parser = commands.add_parser("runs", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("url", nargs="?", default="runs", metavar="URL", help="(default: runs)")
    what = "show your note on a run, or replace it; the dashboard's table of runs has it"
    parser = commands.add_parser("note", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    parser.add_argument("text", nargs="?", metavar="TEXT", help='the new note; "" removes it')


def run(arguments: argparse.Namespace, console: Console | None = None) -> int:
    """Runs one of the three; returns the exit code. Raises InputError, and StorageError for damage."""
    if arguments.command == "status":
        return _status(arguments)
    return _note(arguments) if arguments.command == "note" else _runs(arguments, console)


def _status(arguments: argparse.Namespace) -> int:
    from flows.display.live_view import panel
    from millrace.runs.status import StatusReader
    from storage.stores.factory import open_store

    status = StatusReader(open_store(arguments.run_url)).look()
    if arguments.json:
        print(json.dumps(status, indent=1))
    else:
        Console().print(panel(status, {}))
    return 0


def _note(arguments: argparse.Namespace) -> int:
    from millrace.runs.record import read_note, read_run, write_note
    from storage.stores.factory import open_store

    store = open_store(arguments.run_url)
    if arguments.text is None:
        read_run(store)
        print(read_note(store))
    else:
        write_note(store, arguments.text)
    return 0


def _runs(arguments: argparse.Namespace, console: Console | None) -> int:
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
