"""`millrace dashboard`: its command line."""

import argparse
from pathlib import Path

_MAX_PORT = 65_535


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    summary = "serve a web page that shows runs: staleness, flow, learning, ledger and trajectories"
    parser = commands.add_parser("dashboard", help=summary, description=f"{summary[0].upper()}{summary[1:]}.")
    parser.add_argument(
        "url", nargs="?", default="runs", metavar="URL", help="folder or URL of a run, or of many (default: runs)"
    )
    parser.add_argument("--port", type=_port, default=8050, metavar="N", help="0: any free port (default: 8050)")
    parser.add_argument(
        "--host", default="127.0.0.1", help="address to listen on; any but a loopback address needs a token"
    )
    parser.add_argument("--token", help="secret that readers need; better set as MILLRACE_DASHBOARD_TOKEN")
    parser.add_argument(
        "--export", type=Path, metavar="FILE", help="write the pages into one HTML file instead of serving them"
    )


def run(arguments: argparse.Namespace) -> int:
    """Serves until Ctrl-C, or writes the file, and returns the exit code. Raises InputError and StorageError."""
    if arguments.export is not None:
        return _export(arguments.url, arguments.export)
    from dashboard.server.serve import serve

    serve(arguments.url, host=arguments.host, port=arguments.port, token=arguments.token)
    return 0


def _export(url: str, path: Path) -> int:
    from dashboard.export.page import export, newest_groups
    from dashboard.pages.address import MAX_COMPARED
    from dashboard.pages.site import VIEWS
    from dashboard.read.runs import Runs
    from dashboard.views.comparison import COMPARISON
    from millrace.errors import InputError

    runs = Runs(url)
    run_ids = runs.ids()
    if not 1 <= len(run_ids) <= MAX_COMPARED:
        raise InputError(
            f"has {len(run_ids)} runs", file=runs.url, expected=f"a run, or a folder of 1 to {MAX_COMPARED} runs"
        )
    data = [runs.reader(run_id).look() for run_id in run_ids]
    comparison = [COMPARISON] if len(data) > 1 else []
    export(data, [*comparison, *VIEWS, *map(newest_groups, data)], path)
    print(f"wrote {path}")
    return 0


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > _MAX_PORT:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port: expected a whole number up to {_MAX_PORT}")
    return int(text)
