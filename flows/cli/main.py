"""The `millrace` command: parses the command line, then imports and calls what it needs.

Exit codes: 0 done · 1 a stage that kept dying, with its cause and the end of its log, or an internal error, with its
traceback · 2 a user error, in one line · 3 another controller took over the run · after draining, so that --resume
continues it: 4 cancelled in the Prefect UI, 130 / 143 stopped by Ctrl-C / SIGTERM.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from configs.errors import UserError

FAULT, USER_ERROR, SUPERSEDED = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    from flows.deployment.server import bypass_proxies
    from millrace.errors import LedgerMismatch, StageDied
    from storage.errors import Fenced, StorageError

    bypass_proxies()
    try:
        if arguments.command == "run":
            return _run(arguments)
        if arguments.command == "status":
            return _status(arguments)
        if arguments.command == "replay":
            from flows.cli import replay

            return replay.run(arguments)
        if arguments.command in ("show", "diff"):
            from flows.cli import show

            return show.run(arguments)
        if arguments.command == "import":
            from flows.cli import importing

            return importing.run(arguments)
        if arguments.command == "plan":
            from flows.cli import plan

            return plan.run(arguments)
        if arguments.command == "doctor":
            from flows.cli import doctor

            return doctor.run(arguments)
        if arguments.command == "dashboard":
            from dashboard.server import cli as dashboard

            return dashboard.run(arguments)
        if arguments.command == "mirror":
            from dashboard.integrations.sinks import mirror

            return mirror.run(arguments)
        if arguments.command == "runs":
            from flows.cli import runs

            return runs.run(arguments)
        if arguments.command == "note":
            from flows.cli import note

            return note.run(arguments)
        from flows.cli import maintenance

        return maintenance.run(arguments)
    except Fenced as error:
        print(f"millrace: another controller took over this run: {error}", file=sys.stderr)
        return SUPERSEDED
    except LedgerMismatch as error:
        print(f"millrace: the ledger does not balance, so the run was stopped: {error}", file=sys.stderr)
        return FAULT
    except StageDied as error:
        print("\n".join([f"millrace: {error}", *getattr(error, "__notes__", ())]), file=sys.stderr)
        return FAULT
    except (UserError, StorageError) as error:
        print(f"millrace: {error}", file=sys.stderr)
        return USER_ERROR


class _PrintVersion(argparse.Action):
    """Looks the version up only when it is asked for."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        print(f"millrace {importlib.metadata.version('millrace')}")
        parser.exit()


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="millrace", description="Asynchronous RL post-training as Prefect flows.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version of Millrace")
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
        help="continue the run --run-id from its last checkpoint; `latest`: start it if it does not exist",
    )
    run.add_argument(
        "--accept-changed-inputs",
        action="store_true",
        help="continue although prompts, rewards or another input hold something else than before; this is recorded",
    )
    status = commands.add_parser("status", help="show the state of a run")
    status.add_argument("run_url", metavar="RUN_URL", help="folder or URL of the run: ROOT/RUN_ID")
    status.add_argument("--json", action="store_true", help="everything, as JSON")
    from dashboard.integrations.sinks.mirror import add_parser as add_mirror
    from dashboard.server.cli import add_parser as add_dashboard
    from flows.cli.doctor import add_parser as add_doctor
    from flows.cli.importing import add_parser as add_import
    from flows.cli.maintenance import add_parsers as add_maintenance
    from flows.cli.note import add_parser as add_note
    from flows.cli.plan import add_parser as add_plan
    from flows.cli.replay import add_parser as add_replay
    from flows.cli.runs import add_parser as add_runs
    from flows.cli.show import add_parsers as add_replay_views

    add_runs(commands)
    add_note(commands)
    add_plan(commands)
    add_doctor(commands)
    add_import(commands)
    add_dashboard(commands)
    add_mirror(commands)
    add_replay(commands)
    add_replay_views(commands)
    add_maintenance(commands)
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from configs.load import load_config
    from flows.cli.invocation import run_again
    from millrace.errors import InputError

    overrides = list(arguments.set)
    if arguments.root is not None:
        overrides.append(f"storage.root={json.dumps(arguments.root)}")
    config = load_config(arguments.config, overrides)
    if arguments.resume != "never" and arguments.run_id is None:
        raise InputError(key="--run-id", read="missing", expected="with --resume the run to continue")
    run_id = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}" if arguments.run_id is None else arguments.run_id

    # These two processes start while this one imports what it needs itself, and makes its checks.
    from flows.deployment.server import prefect_server
    from tasks.jobs import stages_here
    from tasks.start import warm_up

    warm_up(stages_here(config))
    with prefect_server() as wait_for_server:
        from flows.cli.run import run_campaign

        accepted = arguments.accept_changed_inputs
        return run_campaign(config, run_id, arguments.resume, accepted, wait_for_server, run_again(arguments, run_id))


def _status(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    from flows.display.live_view import panel
    from millrace.runs.status import StatusReader
    from storage.stores.factory import open_store

    status = StatusReader(open_store(arguments.run_url)).look()
    if arguments.json:
        print(json.dumps(status, indent=1))
    else:
        Console().print(panel(status, {}))
    return 0


def _quiet_prefect() -> None:
    """Sets what suits one campaign at a terminal; what the user has set stays."""
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
