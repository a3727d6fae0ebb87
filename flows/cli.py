"""The `millrace` command: parse, import late, call one thing.

Exit codes: 0 done · 1 a fault of ours, with its traceback · 2 a person's mistake, one sentence · 3 another controller
took the run over · after draining, to be gone on with by --resume: 4 cancelled in the Prefect UI, 130 / 143 stopped by
Ctrl-C / SIGTERM.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from configs.errors import ConfigError

FAULT, MISTAKE, SUPERSEDED = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    from millrace.errors import InputError, LedgerMismatch
    from storage.errors import Fenced, StorageError

    try:
        if arguments.command == "run":
            return _run(arguments)
        if arguments.command == "status":
            return _status(arguments)
        if arguments.command == "replay":
            from flows import replay_cli

            return replay_cli.run(arguments)
        if arguments.command in ("show", "diff"):
            from flows import replay_view

            return replay_view.run(arguments)
        if arguments.command == "dashboard":
            from dashboard import cli as dashboard

            return dashboard.run(arguments)
        if arguments.command == "mirror":
            from dashboard.sinks import mirror

            return mirror.run(arguments)
        from flows import care

        return care.run(arguments)
    except Fenced as error:
        print(f"millrace: another controller took this run over: {error}", file=sys.stderr)
        return SUPERSEDED
    except LedgerMismatch as error:
        print(f"millrace: the ledger does not balance, so the run was stopped: {error}", file=sys.stderr)
        return FAULT
    except (ConfigError, InputError, StorageError) as error:
        print(f"millrace: {error}", file=sys.stderr)
        return MISTAKE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace", description="Asynchronous RL post-training as Prefect flows.")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a campaign")
    run.add_argument("config", type=Path, help="a YAML file, such as configs/presets/tiny-cpu.yaml")
    run.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config"
    )
    run.add_argument("--run-id", help="the run's name and folder; made from the config's name and the time if absent")
    run.add_argument("--root", help="folder or URL under which the run lives; short for --set storage.root=…")
    run.add_argument(
        "--resume",
        nargs="?",
        choices=("required", "latest"),
        const="required",
        default="never",
        help="go on with the run --run-id from its last checkpoint; `latest`: start it where there is none yet",
    )
    status = commands.add_parser("status", help="show what a run has come to")
    status.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    from dashboard.cli import add_parser as add_dashboard
    from dashboard.sinks.mirror import add_parser as add_mirror
    from flows.care import add_parsers as add_care
    from flows.replay_cli import add_parser as add_replay
    from flows.replay_view import add_parsers as add_replay_views

    add_dashboard(commands)
    add_mirror(commands)
    add_replay(commands)
    add_replay_views(commands)
    add_care(commands)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from configs.load import load_config
    from millrace.errors import InputError

    overrides = list(arguments.set)
    if arguments.root is not None:
        overrides.append(f"storage.root={json.dumps(arguments.root)}")
    config = load_config(arguments.config, overrides)
    if arguments.resume != "never" and arguments.run_id is None:
        raise InputError("--resume needs --run-id: which run should go on?")
    run_id = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}" if arguments.run_id is None else arguments.run_id

    from flows.run import run_campaign

    return run_campaign(config, run_id, resume=arguments.resume)


def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from flows.view import panel
    from millrace.status import StatusReader
    from storage.factory import open_store

    status = StatusReader(open_store(arguments.run_url)).look()
    if arguments.json:
        print(json.dumps(status, indent=1))
    else:
        Console().print(panel(status, {}))
    return 0


def _quiet_prefect() -> None:
    """Settings that suit one campaign at a terminal; what the user has set already stays."""
    for name, value in {
        "DO_NOT_TRACK": "1",
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
        "PREFECT_CLIENT_MAX_RETRIES": "12",
        "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
    }.items():
        os.environ.setdefault(name, value)


_quiet_prefect()

if __name__ == "__main__":
    sys.exit(main())
