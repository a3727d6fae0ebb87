"""What durability costs: the same campaign with every commit forced to disk, and with none.

    one start model ─┬─► storage.fsync=true  ─► seconds per step ─┐
                     └─► storage.fsync=false ─► seconds per step ─┴─► cost = on / off − 1        round after round

The campaigns of a round follow each other, and another one begins each round. Seconds per step are the mean over all
steps but the first few of a campaign, since a checkpoint, which is forced to disk too, falls on some steps only.

python -m benchmarks.durability [--steps 100] [--rounds 5] [--set KEY=VALUE …] [--json PATH]
"""

import argparse
import json
import os
import platform
import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from benchmarks.async_vs_sync import run_campaign
from storage import layout

TARGET = 0.03
"""Of the step time, at most."""


def main() -> None:
    """Runs the campaigns, prints the comparison and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=20, help="first steps that are not timed")
    parser.add_argument("--rounds", type=int, default=5, help="campaigns of each kind")
    parser.add_argument("--folder", type=Path, help="where the runs lie for the time being: the disk in question")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-", dir=arguments.folder) as folder:
        root = Path(folder)
        shared = [f"storage.root={root}", f"training.max_steps={arguments.steps}", *arguments.set]
        # Its start model serves all; its times don't count.
        run_campaign(root / "first", [*shared, "training.max_steps=22"], arguments.warmup)
        shared.append(f"model.path={root / 'first' / layout.START_MODEL}")
        seconds: dict[str, list[float]] = {"true": [], "false": []}
        for turn in range(arguments.rounds):
            for fsync in ("true", "false") if turn % 2 else ("false", "true"):
                run = root / f"{turn}-{fsync}"
                measured = run_campaign(run, [*shared, f"storage.fsync={fsync}"], arguments.warmup)
                seconds[fsync].append(measured["seconds_per_step"])
    result = compare(seconds["true"], seconds["false"])
    result["machine"] = {"platform": platform.platform(), "cores": os.cpu_count()}
    _print(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def compare(on: list[float], off: list[float]) -> dict[str, Any]:
    """Seconds per step of campaigns with fsync and without, round by round; `cost` is the median of on / off − 1."""
    costs = [with_fsync / without - 1 for with_fsync, without in zip(on, off, strict=True)]
    return {"on": on, "off": off, "costs": costs, "cost": statistics.median(costs), "target": TARGET}


def _print(result: dict[str, Any]) -> None:
    table = Table(title="Milliseconds per optimizer step")
    for heading in ("round", "fsync", "none", "cost"):
        table.add_column(heading, justify="right")
    for number, (on, off, cost) in enumerate(zip(result["on"], result["off"], result["costs"], strict=True)):
        table.add_row(str(number), f"{1000 * on:.1f}", f"{1000 * off:.1f}", f"{cost:+.1%}")
    console = Console()
    console.print(table)
    verdict = "met" if result["cost"] <= TARGET else "missed"
    console.print(f"durability costs {result['cost']:+.1%} of a step (median); target ≤ {TARGET:.0%}: {verdict}")


if __name__ == "__main__":
    main()
