"""`millrace doctor`: its command line, and what it prints."""

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console

from flows.display.terminal import new_table, plain

if TYPE_CHECKING:
    from millrace.doctor.diagnosis import Line
    from millrace.doctor.machine import Machine

NOT_READY = 1
_WHAT = "say what this machine can do, and what to do about the rest; exit code 1 if no campaign can run"


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = commands.add_parser("doctor", help=_WHAT, description=f"{_WHAT[0].upper()}{_WHAT[1:]}.")
    parser.add_argument("--root", default="runs", metavar="URL", help="where runs will be stored (default: runs)")
    parser.add_argument("--json", action="store_true", help="everything, as JSON")


def run(arguments: argparse.Namespace, console: Console | None = None, machine: "Machine | None" = None) -> int:
    """Prints the diagnosis; returns the exit code."""
    from millrace.doctor.diagnosis import as_json, diagnose, is_ready
    from millrace.doctor.machine import inspect_machine

    lines = diagnose(machine or inspect_machine(arguments.root), arguments.root)
    if arguments.json:
        print(json.dumps(as_json(lines), indent=1, ensure_ascii=False))
    else:
        _print(lines, console or Console())
    return 0 if is_ready(lines) else NOT_READY


def _print(lines: "Sequence[Line]", console: Console) -> None:
    table = new_table("", left=("", "what", "found", "what to do"), right=())
    table.title = None
    for before, line in zip((None, *lines), lines, strict=False):
        if before is None or before.group != line.group:
            if before is not None:
                table.add_section()
            table.add_row("", plain(line.group, "bold"))
        mark, style = _mark(line)
        value = plain(line.value, "" if line.state == "ok" else style)
        table.add_row(plain(mark, style), plain(line.what), value, plain(line.remedy))
    console.print(table)
    stopping = [line.what for line in lines if line.stops_campaigns]
    if stopping:
        console.print(plain(f"No campaign can run here yet: {', '.join(stopping)}.", "bold red"))
    else:
        console.print(plain("Campaigns can run on this machine's CPUs. Try one: make demo", "bold green"))


def _mark(line: "Line") -> tuple[str, str]:
    if line.state == "ok":
        return "✓", "green"
    if line.stops_campaigns:
        return "✗", "bold red"
    return ("!", "yellow") if line.state == "wrong" else ("–", "dim")
