"""The `millrace` command: parses the command line, then imports and calls the requested command.

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
from flows.cli.command_line import SET, Command, add_command, option, run_again

FAULT, USER_ERROR, SUPERSEDED = 1, 2, 3


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = build_parser().parse_args(argv)
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
    """Looks the version up when it is needed: a source tree may not be installed."""

    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        import importlib.metadata

        print(f"millrace {importlib.metadata.version('millrace')}")
        parser.exit()


def build_parser() -> argparse.ArgumentParser:
    """The parser of all commands; parsed arguments hold the function `run_command`."""
    from dashboard.integrations.sinks import mirror
    from dashboard.server import cli as dashboard
    from flows.cli import before_run, maintenance, replay, runs, show

    parser = argparse.ArgumentParser(prog="millrace", description="Asynchronous RL post-training as Prefect flows.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version of Millrace")
    parsers = parser.add_subparsers(dest="command", required=True)
    for command in (_RUN, _SFT):
        add_command(parsers, command)
    for module in (runs, before_run, replay, show, maintenance):
        for command in module.COMMANDS:
            add_command(parsers, command)
    for name, page in (("dashboard", dashboard), ("mirror", mirror)):
        page.add_parser(parsers)
        parsers.choices[name].set_defaults(run_command=page.run)
    return parser


def _sft(arguments: argparse.Namespace) -> int:
    from configs.load import SUPERVISED

    settings = list(SUPERVISED)
    if arguments.source is not None:
        where = _RIGHT if arguments.where is None else arguments.where
        settings += [f"prompts.source={json.dumps(arguments.source)}", f"prompts.where={json.dumps(where)}"]
    elif arguments.where is not None:
        from millrace.errors import InputError

        raise InputError("given", key="--where", expected="--from with it, the stored run whose rollouts it chooses")
    arguments.set = [*settings, *arguments.set]
    return _run(arguments)


def _run(arguments: argparse.Namespace) -> int:
    from configs.load import load_config
    from millrace.errors import InputError

    overrides = list(arguments.set)
    if arguments.root is not None:
        overrides.append(f"storage.root={json.dumps(arguments.root)}")
    config = load_config(arguments.config, overrides)
    if arguments.resume != "never" and arguments.run_id is None:
        raise InputError("missing", key="--run-id", expected="with --resume the run to continue")
    run_id = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}" if arguments.run_id is None else arguments.run_id

    # The server and the warm process start while this one imports modules and makes its checks.
    from flows.deployment.server import prefect_server
    from tasks.jobs import stages_here
    from tasks.start import warm_up

    warm_up(stages_here(config))
    with prefect_server() as wait_for_server:
        from flows.cli.run import run_campaign

        accepted = arguments.accept_changed_inputs
        return run_campaign(config, run_id, arguments.resume, accepted, wait_for_server, run_again(arguments, run_id))


_OF_A_RUN = [
    option("config", type=Path, help="a YAML file, such as configs/presets/tiny-cpu.yaml"),
    SET,
    option("--run-id", help="the run's name and folder; made from the config's name and the time if absent"),
    option("--root", help="folder or URL under which the run lives; short for --set storage.root=…"),
    option(
        "--resume",
        nargs="?",
        choices=("required", "latest"),
        const="required",
        default="never",
        help="continue the run --run-id from its last checkpoint; `latest`: start it if it does not exist",
    ),
    option(
        "--accept-changed-inputs",
        action="store_true",
        help="continue although prompts, rewards or another input have changed; this is recorded",
    ),
]
_RIGHT = "reward >= 1"
_RUN = Command("run", _run, "run a campaign", _OF_A_RUN)
_SFT = Command(
    "sft",
    _sft,
    "run a campaign that learns demonstrations: those in prompts.source, or rollouts of a stored run",
    [
        *_OF_A_RUN,
        option("--from", dest="source", metavar="RUN_URL", help="learn rollouts of this run, a folder or URL"),
        option("--where", metavar="SQL", help=f"only rollouts for which this holds (default: '{_RIGHT}')"),
    ],
)

# Suits one campaign at a terminal; a user's own settings stay.
for _name, _value in {
    "DO_NOT_TRACK": "1",
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "PREFECT_LOGGING_HANDLERS_CONSOLE_LEVEL": "CRITICAL",
    "PREFECT_CLIENT_MAX_RETRIES": "12",
    "PREFECT_FLOWS_HEARTBEAT_FREQUENCY": "60",
}.items():
    os.environ.setdefault(_name, _value)

if __name__ == "__main__":
    sys.exit(main())
