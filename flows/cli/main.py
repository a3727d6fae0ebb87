"""The `millrace` command: parses the command line, then imports and calls the requested command.

Exit codes: 0 done · 1 a stage that kept dying, with its cause and the end of its log, or an internal error, with its
traceback · 2 a user error, in one line · 3 another controller took over the run · after draining, so that --resume
continues it: 4 cancelled in the Prefect UI, 130 / 143 stopped by Ctrl-C / SIGTERM.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from configs.errors import UserError
from flows.cli.command_line import add_command

FAULT, USER_ERROR, SUPERSEDED, INTERRUPTED = 1, 2, 3, 130


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    words = sys.argv[1:] if argv is None else list(argv)
    arguments = build_parser().parse_args(words, argparse.Namespace(words=words))
    from flows.deployment.server import bypass_proxies
    from millrace.errors import LedgerMismatch, StageDied
    from storage.errors import Fenced, StorageError

    bypass_proxies()
    try:
        code: int = arguments.run_command(arguments)
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
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
    from flows.cli import before_run, init, maintenance, replay, runs, show, start

    parser = argparse.ArgumentParser(prog="millrace", description="Asynchronous RL post-training as Prefect flows.")
    parser.add_argument("--version", action=_PrintVersion, nargs=0, help="print the version of Millrace")
    parsers = parser.add_subparsers(dest="command", required=True)
    for module in (init, start, runs, before_run, replay, show, maintenance):
        for command in module.COMMANDS:
            add_command(parsers, command)
    for name, page in (("dashboard", dashboard), ("mirror", mirror)):
        page.add_parser(parsers)
        parsers.choices[name].set_defaults(run_command=page.run)
    return parser


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
