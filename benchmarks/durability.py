"""The cost of durability: the same campaign with fsync on every commit, and with none.

    one start model ─┬─► storage.fsync=true  ─► seconds per step ─┐
                     └─► storage.fsync=false ─► seconds per step ─┴─► cost = on / off − 1        round after round

The campaigns of a round run one after the other, in alternating order. Seconds per step are the mean over all steps but
the first few of a campaign, because only some steps have a checkpoint, which is synced too.

python -m benchmarks.durability [--steps 100] [--rounds 5] [--set KEY=VALUE …] [--json PATH]
"""

import statistics
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.async_vs_sync import run_campaign
from benchmarks.report import add_settings, machine, make_parser, make_table, write_json
from storage import layout

TARGET = 0.03
"""At most this share of the step time."""


def main() -> None:
    """Runs the campaigns, prints the comparison and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=20, help="first steps that are not timed")
    parser.add_argument("--rounds", type=int, default=5, help="campaigns of each kind")
    parser.add_argument("--folder", type=Path, help="temporary folder of the runs, on the disk to measure")
    add_settings(parser)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-", dir=arguments.folder) as folder:
        root = Path(folder)
        shared = [f"storage.root={root}", f"training.max_steps={arguments.steps}", *arguments.set]
        # Only makes the start model for all; its times are not used.
        run_campaign(root / "first", [*shared, "training.max_steps=22"], arguments.warmup)
        shared.append(f"model.path={root / 'first' / layout.START_MODEL}")
        seconds: dict[str, list[float]] = {"true": [], "false": []}
        for turn in range(arguments.rounds):
            for fsync in ("true", "false") if turn % 2 else ("false", "true"):
                run = root / f"{turn}-{fsync}"
                measured = run_campaign(run, [*shared, f"storage.fsync={fsync}"], arguments.warmup)
                seconds[fsync].append(measured["seconds_per_step"])
    result = compare(seconds["true"], seconds["false"])
    result["machine"] = machine()
    _print(result)
    write_json(arguments.json, result)


def compare(on: list[float], off: list[float]) -> dict[str, Any]:
    """Seconds per step of campaigns with fsync and without, round by round; `cost` is the median of on / off − 1."""
    costs = [with_fsync / without - 1 for with_fsync, without in zip(on, off, strict=True)]
    return {"on": on, "off": off, "costs": costs, "cost": statistics.median(costs), "target": TARGET}


def _print(result: dict[str, Any]) -> None:
    table = make_table("Milliseconds per optimizer step", ("round", "fsync", "none", "cost"))
    for number, (on, off, cost) in enumerate(zip(result["on"], result["off"], result["costs"], strict=True)):
        table.add_row(str(number), f"{1000 * on:.1f}", f"{1000 * off:.1f}", f"{cost:+.1%}")
    console = Console()
    console.print(table)
    verdict = "met" if result["cost"] <= TARGET else "missed"
    console.print(f"durability costs {result['cost']:+.1%} of a step (median); target ≤ {TARGET:.0%}: {verdict}")


if __name__ == "__main__":
    main()
