"""What evaluation beside training costs: the same campaign with it and without, in turn.

    one start model ─┬─► campaign, evaluation.every=N     ─► seconds per step ─┐
                     └─► campaign, evaluation.every=null  ─► seconds per step ─┴─► ratio of each pair, their median

Both campaigns make the same checkpoints unless `evaluation.every` is no multiple of `training.checkpoint_every`.
Seconds per step are the mean over all steps but the first few, during which the base model is evaluated.

    python -m benchmarks.evaluation_cost [--every 20] [--steps 120] [--pairs 3] [--set KEY=VALUE …] [--json PATH]
"""

import json
import tempfile
from pathlib import Path
from statistics import median
from typing import Any

from rich.console import Console

from benchmarks.async_vs_sync import run_campaign
from benchmarks.report import add_settings, machine, make_parser, make_table, write_json
from storage import layout


def main() -> None:
    """Runs the campaigns, prints the comparison and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--every", type=int, default=20, help="versions between two evaluations")
    parser.add_argument("--steps", type=int, default=120, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=20, help="first steps that are not timed")
    parser.add_argument("--pairs", type=int, default=3, help="campaigns of each kind")
    add_settings(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as folder:
        root = Path(folder)
        shared = [f"storage.root={root}", *arguments.set]
        # Its start model serves all.
        run_campaign(root / "start", [*shared, "training.max_steps=2", "evaluation.every=null"], 0)
        shared += [f"training.max_steps={arguments.steps}", f"model.path={root / 'start' / layout.START_MODEL}"]
        pairs = []
        for number in range(arguments.pairs):
            settings = {"with": str(arguments.every), "without": "null"}
            pair: dict[str, dict[str, Any]] = {}
            # Each kind is the first one in turn.
            for kind in sorted(settings, reverse=bool(number % 2)):
                run = root / f"{kind}-{number}"
                pair[kind] = _measured(run, [*shared, f"evaluation.every={settings[kind]}"], arguments.warmup)
            pairs.append(pair)
    ratios = [pair["with"]["seconds_per_step"] / pair["without"]["seconds_per_step"] for pair in pairs]
    result = {"every": arguments.every, "pairs": pairs, "ratios": ratios, "ratio": median(ratios), "machine": machine()}
    _print(result)
    write_json(arguments.json, result)


def _measured(run: Path, settings: list[str], warmup: int) -> dict[str, Any]:
    measured = run_campaign(run, settings, warmup)
    evaluations = json.loads((run / layout.SUMMARY).read_text())["evaluations"]
    stage = json.loads((run / layout.progress("evaluate", 0)).read_text())
    return {
        "seconds_per_step": measured["seconds_per_step"],
        "evaluated": [one["policy_version"] for one in evaluations],
        "evaluate_seconds": stage["seconds"].get("evaluate", 0.0),
    }


def _print(result: dict[str, Any]) -> None:
    table = make_table(
        f"Evaluation every {result['every']} versions",
        ("pair", "with, ms/step", "without, ms/step", "ratio", "versions"),
    )
    for number, (pair, ratio) in enumerate(zip(result["pairs"], result["ratios"], strict=True)):
        seconds = (f"{1000 * pair[kind]['seconds_per_step']:.1f}" for kind in ("with", "without"))
        table.add_row(str(number), *seconds, f"{ratio:.3f}", str(len(pair["with"]["evaluated"])))
    console = Console()
    console.print(table)
    console.print(f"median ratio {result['ratio']:.3f}")


if __name__ == "__main__":
    main()
