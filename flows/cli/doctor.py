"""`millrace doctor`: the diagnosis of this machine as a table."""

import argparse
import json

from flows.cli.command_line import JSON, Command, option
from flows.display.tables import echo, new_table, plain

NOT_READY = 1


def _doctor(arguments: argparse.Namespace) -> int:
    from millrace.doctor.diagnosis import as_json, diagnose, is_ready
    from millrace.doctor.machine import Machine

    lines = diagnose(Machine(arguments.root))
    code = 0 if is_ready(lines) else NOT_READY
    if arguments.json:
        print(json.dumps(as_json(lines), indent=1, ensure_ascii=False))
        return code
    table = new_table("", left=("", "what", "found", "what to do"))
    group = ""
    for line in lines:
        if line.group != group:
            if group:
                table.add_section()
            group = line.group
            table.add_row("", plain(group, "bold"))
        mark, style = ("✗", "bold red") if line.stops_campaigns else _MARKS[line.state]
        value = plain(line.value, "" if line.state == "ok" else style)
        table.add_row(plain(mark, style), plain(line.what), value, plain(line.remedy))
    if stopping := [line.what for line in lines if line.stops_campaigns]:
        verdict = plain(f"No campaign can run here yet: {', '.join(stopping)}.", "bold red")
    else:
        verdict = plain("Campaigns can run on this machine's CPUs. Try one: make demo", "bold green")
    echo(table, verdict)
    return code


_MARKS = {"ok": ("✓", "green"), "wrong": ("!", "yellow"), "absent": ("–", "dim")}

COMMANDS = [
    Command(
        "doctor",
        _doctor,
        "say what this machine can do, and what to do about the rest; exit code 1 if no campaign can run",
        [option("--root", default="runs", metavar="URL", help="where runs will be stored (default: runs)"), JSON],
    )
]
