"""How much of the possible speed-up asynchrony achieves: the same work, with a barrier at every step and without.

    one start model ─┬─► campaign, pipeline.mode=sync  ─► stage times, seconds per step ─┬─► speed-up ÷ bound
                     └─► campaign, pipeline.mode=async ─► stage times, seconds per step ─┘

    bound = Σ stage times / max stage time, per step, measured in the sync run, where stages do not disturb each other

The bound is a pipeline with perfect overlap, which is as fast as its slowest stage. Stage times are busy times, without
waiting. Seconds per step are the mean over all steps but the first few, which fill the pipeline.

    python -m benchmarks.async_vs_sync [--steps 60] [--set KEY=VALUE …] [--json PATH]
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.report import PRESET, add_settings, machine, make_parser, make_table, write_json
from storage import layout
from storage.schema import METRIC
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

_STAGES = ("generate", "score", "train", "sync")


def main() -> None:
    """Runs both campaigns, prints the comparison and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that are not timed")
    add_settings(parser)
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
    result["machine"] = machine()
    _print(result)
    write_json(arguments.json, result)


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
    """Runs a campaign of the tiny preset in the folder `run`; times per step exclude the first `warmup` steps."""
    sets = [part for setting in settings for part in ("--set", setting)]
    command = [sys.executable, "-m", "flows.cli.main", "run", str(PRESET), "--run-id", run.name, *sets]
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
    table = make_table("Milliseconds per optimizer step", ("", "sync", "async"))
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
