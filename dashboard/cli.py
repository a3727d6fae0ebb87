"""`millrace dashboard`: its command line."""

import argparse
from pathlib import Path

_MAX_PORT = 65_535


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    what = "serve a web page that shows runs: staleness, flow, learning, ledger and trajectories"
    parser = commands.add_parser("dashboard", help=what, description=f"{what[0].upper()}{what[1:]}.")
    parser.add_argument(
        "url", nargs="?", default="runs", metavar="URL", help="folder or URL of a run, or of many (default: runs)"
    )
    parser.add_argument("--port", type=_port, default=8050, metavar="N", help="0: one that is free (default: 8050)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any but this machine's own needs a token"
    )
    parser.add_argument("--token", help="what readers have to know; better given as MILLRACE_DASHBOARD_TOKEN")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the pages into one HTML file, and serve none"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C, or writes the file; returns the exit code.

    Raises InputError and StorageError: a person's mistake, or a store that can't be read.
    """
    if arguments.export is not None:
        return _export(arguments.url, arguments.export)
    from dashboard.serve import serve

    serve(arguments.url, host=arguments.host, port=arguments.port, token=arguments.token)
    return 0


def _export(url: str, path: Path) -> int:
    from dashboard.export import export
    from dashboard.export_groups import newest_groups
    from dashboard.pages.address import MAX_COMPARED
    from dashboard.runs import Runs
    from dashboard.views import VIEWS
    from millrace.errors import InputError

    runs = Runs(url)
    run_ids = runs.ids()
    if not 1 <= len(run_ids) <= MAX_COMPARED:
        raise InputError(
            f"{runs.url}: {len(run_ids)} runs; expected a run to export, or 1 to {MAX_COMPARED} in a folder"
        )
    found = [runs.reader(run_id).look() for run_id in run_ids]
    export(found, [*VIEWS, *map(newest_groups, found)], path)
    print(f"wrote {path}")
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is no port: expected a whole number up to {_MAX_PORT}")
    return int(text)
