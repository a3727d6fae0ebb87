"""How much of what asynchrony can give is had: the same work, once with a barrier at every step and once without.

    one start model ─┬─► campaign, pipeline.mode=sync  ─► stage times, seconds per step ─┬─► speed-up ÷ bound
                     └─► campaign, pipeline.mode=async ─► stage times, seconds per step ─┘

    bound = Σ stage times / max stage time, per step, as measured in the sync run, where no stage disturbs another

A pipeline whose stages overlap perfectly is as fast as its slowest stage: that is the bound. Stage times are busy
times, so waiting counts for none. Seconds per step are the mean over all steps but the first few, which fill the
pipeline.

    python -m benchmarks.async_vs_sync [--steps 60] [--set KEY=VALUE …] [--json PATH]
"""

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from storage import layout
from storage.factory import open_store
from storage.schema import METRIC
from storage.stream import StreamReader

_PRESET = Path("configs/presets/tiny-cpu.yaml")
_STAGES = ("generate", "score", "train", "sync")


def main() -> None:
    """Runs both campaigns, prints the comparison and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not timed")
    parser.add_argument(
        "--set", action="extend", nargs="+", default=[], metavar="KEY=VALUE", help="change keys of the config"
    )
    parser.add_argument("--json", type=Path, help="where to write the figures")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warmup + 2:
        parser.error(f"--steps is {arguments.steps}; expected at least two more than --warmup, {arguments.warmup}")
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        root = Path(folder)
        # The start model of the sync campaign serves both.
        model = root / "sync" / layout.START_MODEL
        shared = [f"storage.root={root}", f"training.max_steps={arguments.steps}", *arguments.set]
        runs = {
            "sync": run_campaign(root / "sync", [*shared, "pipeline.mode=sync"], arguments.warmup),
            "async": run_campaign(root / "async", [*shared, f"model.path={model}"], arguments.warmup),
        }
    result = compare(runs["sync"], runs["async"])
    result["machine"] = {"platform": platform.platform(), "cores": os.cpu_count()}
    _print(result)
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(result, indent=1) + "\n")


def compare(sync: dict[str, Any], asynchronous: dict[str, Any]) -> dict[str, Any]:
    """Speed-up, bound and their quotient from the two runs' `seconds_per_step` and `stage_seconds` (per step)."""
    stage_seconds = sync["stage_seconds"].values()
    speedup = sync["seconds_per_step"] / asynchronous["seconds_per_step"]
    bound = sum(stage_seconds) / max(stage_seconds)
    return {
        "sync": sync,
        "async": asynchronous,
        "speedup": speedup,
        "bound": bound,
        "speedup_over_bound": speedup / bound,
    }


def run_campaign(run: Path, settings: list[str], warmup: int) -> dict[str, Any]:
    """One campaign of the tiny preset in the folder `run`: what it took per step, the first `warmup` not counted."""
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "flows.cli", "run", str(_PRESET), "--run-id", run.name, *sets]
    subprocess.run(command, check=True, stdout=sys.stderr)
    summary = json.loads((run / layout.SUMMARY).read_text())
    times = step_times(run)[warmup:]
    return {
        "seconds_per_step": (times[-1] - times[0]) / (len(times) - 1),
        "stage_seconds": {stage: summary["seconds"][stage] / summary["steps"] for stage in _STAGES},
        "steps": summary["steps"],
        "staleness": summary["staleness"],
        "accuracy": {name: evaluation["accuracy"] for name, evaluation in summary["eval"].items()},
        "tokens_per_step": summary["ledger"]["trained"]["tokens"] / summary["steps"],
    }


def step_times(run: Path) -> list[float]:
    """When each optimizer step of a finished run ended, unix seconds, in order."""
    reader = StreamReader(open_store(str(run)), layout.metrics("train", 0), METRIC)
    times: dict[int, float] = {}
    while (part := reader.next()) is not None:
        rows = zip(part.table["policy_version"].to_pylist(), part.table["t"].to_pylist(), strict=True)
        times.update(rows)
    return [time for _, time in sorted(times.items())]


def _print(result: dict[str, Any]) -> None:
    table = Table(title="Milliseconds per optimizer step")
    for heading in ("", "sync", "async"):
        table.add_column(heading, justify="right" if heading else "left")
    for stage in _STAGES:
        table.add_row(stage, *(f"{1000 * result[mode]['stage_seconds'][stage]:.1f}" for mode in ("sync", "async")))
    table.add_row("step", *(f"{1000 * result[mode]['seconds_per_step']:.1f}" for mode in ("sync", "async")))
    console = Console()
    console.print(table)
    console.print(
        f"speed-up {result['speedup']:.2f}, bound Σ/max {result['bound']:.2f}, "
        f"speed-up ÷ bound {result['speedup_over_bound']:.2f}"
    )


if __name__ == "__main__":
    main()
