"""`millrace status`, `runs` and `note`: the state of a run, a table of runs, and a person's note on a run."""

import argparse
import json
from typing import TYPE_CHECKING

from flows.cli.command_line import JSON, RUN_URL, Command, option
from flows.display.tables import duration, echo, local_time, new_table
from storage.stores.factory import open_store

if TYPE_CHECKING:
    from dashboard.read.model import OverviewRow


def _status(arguments: argparse.Namespace) -> int:
    from millrace.runs.record import read_run

    store = open_store(arguments.run_url)
    # Before the other imports, which take a second: a wrong address is an error at once.
    read_run(store)
    from flows.display.live_view import panel
    from millrace.runs.status import StatusReader

    status = StatusReader(store).look()
    if arguments.json:
        print(json.dumps(status, indent=1))
    else:
        echo(panel(status))
    return 0


def _runs(arguments: argparse.Namespace) -> int:
    from dashboard.read.runs import Runs

    runs = Runs(arguments.url)
    rows = runs.overview()
    if not rows:
        echo(f"No runs in {runs.url}.")
        return 0
    # Runs that can't be read are last. Start and duration are the newest attempt's.
    cells = [_cells(row) for row in sorted(rows, key=lambda row: -(row.t_started or 0.0))]
    columns = ("version", "accuracy", "started", "took")
    table = new_table(f"runs in {runs.url}", left=("run", "state"), right=columns, rows=cells)
    # So that generated run ids fit into 80 columns.
    table.padding = 0
    echo(table)
    for row in rows:
        problems = row.missing if row.problem is None else [row.problem]
        echo(*(f"{row.run_id}: {problem}" for problem in problems))
    return 0


def _cells(row: "OverviewRow") -> list[str]:
    if row.problem is not None:
        return [row.run_id, *["–"] * 5]
    return [
        row.run_id,
        row.state or "–",
        f"{'–' if row.policy_version is None else row.policy_version}/{row.max_steps}",
        "–" if row.accuracy is None else f"{row.accuracy:.3f} v{row.accuracy_version}",
        "–" if row.t_started is None else local_time(row.t_started).rpartition(":")[0],
        "–" if row.wall_seconds is None else duration(row.wall_seconds),
    ]


def _note(arguments: argparse.Namespace) -> int:
    from millrace.runs.record import read_note, read_run, write_note

    store = open_store(arguments.run_url)
    if arguments.text is None:
        read_run(store)
        print(read_note(store))
    else:
        write_note(store, arguments.text)
    return 0


_URL = option("url", nargs="?", default="runs", metavar="URL", help="(default: runs)")
_TEXT = option("text", nargs="?", metavar="TEXT", help='the new note; "" removes it')
COMMANDS = [
    Command("status", _status, "show the state of a run", [RUN_URL, JSON]),
    Command("runs", _runs, "list the runs below a folder or URL, the one started last first", [_URL]),
    Command(
        "note", _note, "show your note on a run, or replace it; the dashboard's table of runs has it", [RUN_URL, _TEXT]
    ),
]
