"""`millrace doctor` and `millrace plan`: what this machine can do, and what a campaign will take."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from flows.cli.command_line import JSON, SET, Command, count, lengths, option, positive
from flows.display.tables import echo, for_terminal, new_table, plain
from millrace.errors import InputError, writing
from storage.stores.factory import open_store

if TYPE_CHECKING:
    from configs.schema import RunConfig


NOT_READY = 1
"""Exit code of `doctor` if no campaign can run."""
_MARKS = {"ok": ("✓", "green"), "wrong": ("!", "yellow"), "absent": ("–", "dim")}


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


def _plan(arguments: argparse.Namespace) -> int:
    from configs.requests import PlanRequest
    from flows.operations.planning import answer, headline, sections, write_config

    values = {name: value for name, value in vars(arguments).items() if name in PlanRequest.model_fields}
    plan = answer(_config(arguments), PlanRequest(**values))
    if arguments.write is not None:
        write_config(plan, arguments.write)
    if arguments.json is not None:
        text = json.dumps(plan.to_json(), indent=1, ensure_ascii=False)
        if str(arguments.json) == "-":
            print(text)
            return 0
        with writing(arguments.json):
            arguments.json.write_text(f"{text}\n", encoding="utf-8")
    echo(plain(headline(plan), "bold"))
    for section in sections(plan):
        echo(*for_terminal(section))
    if arguments.write is not None:
        echo(f"written: millrace run {arguments.write}")
    return 0


def _config(arguments: argparse.Namespace) -> "RunConfig":
    from configs.load import load_config, with_overrides
    from millrace.runs.record import latest_attempt

    if arguments.config is not None:
        return load_config(arguments.config, arguments.set)
    if not arguments.sources:
        raise InputError("nothing to plan", expected="a config file, or --from with a stored run, whose config is used")
    source = arguments.sources[0]
    return with_overrides(latest_attempt(open_store(source)).config, arguments.set, where=source)


_LENGTHS = "log-normal response lengths and the prompts' length, in tokens: 800,0.8,200"
COMMANDS = [
    Command(
        "doctor",
        _doctor,
        "say what this machine can do, and what to do about the rest; exit code 1 if no campaign can run",
        [option("--root", default="runs", metavar="URL", help="where runs will be stored (default: runs)"), JSON],
    ),
    Command(
        "plan",
        _plan,
        "say what a campaign will take, before it runs: split of the GPUs, seconds per step, staleness, memory, cost",
        [
            option("config", type=Path, nargs="?", help="a YAML file (default with --from: the first run's config)"),
            SET,
            option("--hardware", metavar="KIND", help="kind of GPU, such as h100"),
            option("--gpus", type=count, metavar="N", help="total GPUs, shared by trainer and generators"),
            option("--model", metavar="NAME", help="such as llama-8b, or a model's folder; default: the config's"),
            option("--from", action="extend", nargs="+", default=[], dest="sources", metavar="RUN_URL",
                   help="stored runs of one machine, from which durations and lengths are taken"),
            option("--cores", type=positive, metavar="N", help="with --from: CPU cores that all stages share"),
            option("--what-if", action="extend", nargs="+", default=[], metavar="KEY=VALUE",
                   help="compare the config with these changes of it, instead of a search"),
            option("--goal", choices=("fastest", "cheapest"), default="fastest",
                   help="most tokens per second (default), or fewest GPU-hours per token"),
            option("--batch", type=count, nargs="+", default=[], dest="batches", metavar="GROUPS",
                   help="try these training.groups_per_step too"),
            option("--price", type=positive, metavar="DOLLARS", help="of one GPU for an hour"),
            option("--steps", type=count, metavar="N", help="steps to simulate (default: at most 100)"),
            option("--lengths", type=lengths, metavar="MEAN,SIGMA,PROMPT", help=_LENGTHS),
            option("--json", type=Path, metavar="PATH", help="write everything there as JSON; - prints it"),
            option("--write", type=Path, metavar="PATH", help="write the planned config there, for `millrace run`"),
        ],
    )
]  # fmt: skip
