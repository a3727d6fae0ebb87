"""How fast a large campaign is simulated: 1,024 GPUs, half of which generate.

32 generators of 16 GPUs, 64 groups of 8 responses a step, log-normal lengths with a mean of 1,000 tokens
"""

import argparse
import time
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import machine, make_table, print_targets, write_json
from configs.schema import RunConfig
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import LogNormalLengths
from millrace.planning.simulation.simulate import simulate

_GROUP_SIZE, _PROMPT_TOKENS, _MEAN_TOKENS, _MAX_TOKENS = 8, 200, 1000, 8192
_CASES = {"generation is slower": 3e-2, "as fast as each other": 2e-2, "training is slower": 1e-2}
"""Seconds per token of a generator with one request, by what that makes of the campaign."""
_LONGEST = 10.0
"""Seconds of one core."""


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command `speed`."""
    parser = commands.add_parser("speed", help="how fast a campaign of 1,024 GPUs is simulated")
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    parser.add_argument("--steps", type=int, default=10_000, help="optimizer steps of each campaign")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Simulates the cases, prints how long each took, and writes it as JSON."""
    rows = [_row(name, token_seconds, arguments.steps) for name, token_seconds in _CASES.items()]
    headings = ("", "seconds of one core", "seconds per step", "train idle", "places taken")
    table = make_table(f"{arguments.steps:,} steps of 1,024 GPUs", headings)
    for row in rows:
        table.add_row(
            row["name"],
            f"{row['seconds']:.1f}",
            f"{row['step_seconds']:.2f}",
            f"{row['train_idle']:.2f}",
            f"{row['places_taken']:.2f}",
        )
    targets = {f"{arguments.steps:,} steps in {_LONGEST:g} s": all(row["seconds"] <= _LONGEST for row in rows)}
    console = Console()
    console.print(table)
    print_targets(console, targets)
    write_json(arguments.json, {"rows": rows, "targets": targets, "machine": machine()})


def _row(name: str, token_seconds: float, steps: int) -> dict[str, Any]:
    settings: dict[str, Any] = {
        "generation": {
            "replicas": 32,
            "group_size": _GROUP_SIZE,
            "groups_per_batch": 4,
            "max_new_tokens": _MAX_TOKENS,
        },
        "training": {"groups_per_step": 64, "max_steps": steps},
        "scoring": {"replicas": 8},
        "staleness": {"max_staleness": 4},
    }
    costs = Costs(
        decode=lambda requests, tokens: token_seconds * (1 + requests / 100) + 1e-7 * tokens,
        prefill=lambda tokens: 1e-5 * tokens,
        score=0.1,
        train=lambda tokens, rollouts: 2.5e-5 * tokens,
        handover=0.1,
        push=1.0,
        pause=0.2,
        checkpoint=5.0,
        overhead=0.2,
    )
    lengths = LogNormalLengths(
        prompt_tokens=_PROMPT_TOKENS,
        mean_tokens=_MEAN_TOKENS,
        sigma=1.0,
        max_tokens=_MAX_TOKENS,
        group_size=_GROUP_SIZE,
    )
    started = time.process_time()
    outcome = simulate(RunConfig.model_validate(settings), costs, lengths, steps=steps, warmup=steps // 10)
    return {
        "name": name,
        "seconds": time.process_time() - started,
        "step_seconds": outcome.step_seconds,
        "train_idle": outcome.idle["train"],
        "places_taken": outcome.places_taken,
    }
