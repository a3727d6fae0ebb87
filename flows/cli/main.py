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
        code: int = arguments.run_command(arguments)
        return code
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
    run.set_defaults(run_command=_run)
    _add_others(commands)
    return parser


def _add_others(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the commands of other modules, which import what they need when they run."""
    from dashboard.integrations.sinks import mirror
    from dashboard.server import cli as dashboard
    from flows.cli import doctor, maintenance, plan, replay, runs, show

    for add, run in (
        (runs.add_status, runs.run),
        (runs.add_parsers, runs.run),
        (plan.add_parser, plan.run),
        (doctor.add_parser, doctor.run),
        (dashboard.add_parser, dashboard.run),
        (mirror.add_parser, mirror.run),
        (replay.add_parser, replay.run),
        (show.add_parsers, show.run),
        (maintenance.add_parsers, maintenance.run),
    ):
        known = set(commands.choices)
        add(commands)
        for name in commands.choices.keys() - known:
            commands.choices[name].set_defaults(run_command=run)


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
