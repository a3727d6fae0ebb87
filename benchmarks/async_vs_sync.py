"""How much of the possible speed-up asynchrony achieves: the same work, with a barrier at every step and without.

    start model ─┬─► campaign, pipeline.mode=sync  ─► stage times, seconds per step ─┬─► speed-up ÷ bound
                 └─► campaign, pipeline.mode=async ─► stage times, seconds per step ─┘

    bound = Σ stage times / max stage time, per step, measured in the sync run, where stages do not disturb each other

The bound is a pipeline with perfect overlap, which is as fast as its slowest stage. Stage times are busy times, without
waiting. Seconds per step are the mean over all steps but the first few, which fill the pipeline.

    python -m benchmarks.async_vs_sync [--steps 60] [--set KEY=VALUE …] [--json PATH]
"""

import tempfile
from pathlib import Path
from typing import Any

from benchmarks.harness import add_settings, finish, make_parser, print_line, print_table, run_campaign
from millrace.runs.history import read_steps
from storage import layout
from storage.stores.factory import open_store

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
    settings = [f"training.max_steps={arguments.steps}", *arguments.set]
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        sync, asynchronous = Path(folder, "sync"), Path(folder, "async")
        # The start model of the sync campaign serves both.
        result = compare(
            measure(sync, [*settings, "pipeline.mode=sync"], arguments.warmup),
            measure(asynchronous, [*settings, f"model.path={sync / layout.START_MODEL}"], arguments.warmup),
        )
    _print(result)
    finish(arguments.json, result)


def compare(sync: dict[str, Any], asynchronous: dict[str, Any]) -> dict[str, Any]:
    """Computes speed-up, bound and their quotient from the runs' `seconds_per_step` and `stage_seconds` (per step)."""
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


def measure(run: Path, settings: list[str], warmup: int) -> dict[str, Any]:
    """Runs a campaign of the tiny preset in the folder `run`. Times per step exclude the first `warmup` steps."""
    summary = run_campaign(run, settings)
    times = [step.t for step in read_steps(open_store(str(run)))][warmup:]
    return {
        "seconds_per_step": (times[-1] - times[0]) / (len(times) - 1),
        "stage_seconds": {stage: summary["seconds"][stage] / summary["steps"] for stage in _STAGES},
        "steps": summary["steps"],
        "staleness": summary["staleness"],
        "accuracy": {name: evaluation["accuracy"] for name, evaluation in summary["eval"].items()},
        "tokens_per_step": summary["ledger"]["trained"]["tokens"] / summary["steps"],
    }


def _print(result: dict[str, Any]) -> None:
    modes = (result["sync"], result["async"])
    rows = [[stage, *(f"{1000 * mode['stage_seconds'][stage]:.1f}" for mode in modes)] for stage in _STAGES]
    rows.append(["step", *(f"{1000 * mode['seconds_per_step']:.1f}" for mode in modes)])
    print_table("Milliseconds per optimizer step", ("", "sync", "async"), rows)
    print_line(
        f"speed-up {result['speedup']:.2f}, bound Σ/max {result['bound']:.2f}, "
        f"speed-up ÷ bound {result['speedup_over_bound']:.2f}"
    )


if __name__ == "__main__":
    main()
