"""How this process was started, and what to type to go on with its run."""

import argparse
import shlex
import shutil
import sys
from pathlib import Path


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
