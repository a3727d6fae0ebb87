"""How a command with stages was started, what to type to continue its run, and how Ctrl-C and SIGTERM stop it."""

import argparse
import shlex
import shutil
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import NoReturn

from rich.console import Console

INTERRUPTED, TERMINATED = 130, 143
"""Exit codes after Ctrl-C and SIGTERM. Every stage has drained by then."""


def run_again(arguments: argparse.Namespace, run_id: str) -> str:
    """The command line of `millrace run` with the same config and settings, for the run `run_id`; without --resume."""
    command = [*_program(), "run", str(arguments.config)]
    if arguments.set:
        command += ["--set", *arguments.set]
    if arguments.root is not None:
        command += ["--root", arguments.root]
    return shlex.join([*command, "--run-id", run_id])


def _program() -> list[str]:
    program = Path(sys.argv[0])
    if program.name != "millrace":
        return [sys.executable, "-m", "flows.cli.main"]
    on_path = shutil.which("millrace")
    return ["millrace"] if on_path is not None and Path(on_path).resolve() == program.resolve() else [sys.argv[0]]


class Terminated(BaseException):
    """SIGTERM as an exception: Prefect passes the signal on once the flow has drained its stages."""


def stop_on_signals(console: Console) -> None:
    """From now on, Ctrl-C raises KeyboardInterrupt in the main thread, and SIGTERM Terminated; a line says so."""

    def stop(signal_number: int, frame: FrameType | None) -> NoReturn:
        line = "stopping: each stage finishes and commits what it is doing; stop once more to kill them"
        console.print(line, markup=False, highlight=False, soft_wrap=True)
        raise KeyboardInterrupt if signal_number == signal.SIGINT else Terminated

    # SIGINT too: a shell script starts its background jobs with it ignored, and this one has stages to drain.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop)
