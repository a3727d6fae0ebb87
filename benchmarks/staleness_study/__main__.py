"""The cost of staleness for each loss: the tiny task with every bound, loss and seed.

    one start model ─► campaign η=0, aipo, seed 0 ─┐
                   ├─► campaign η=1, aipo, seed 0 ─┼─► one row per campaign ─► medians over seeds ─► table, JSON, plots
                   └─► …                          ─┘

Each campaign is a real one, in its own folder under --root, so an interrupted study can be continued. A campaign that
diverged is a row too. Only loss and bound differ: start model and prompts are those of the tiny preset. Seeds change
the order of prompts and the responses.

    python -m benchmarks.staleness_study --root FOLDER [--steps 150] [--losses aipo,…] [--bounds 0,1,…] [--seeds 3]
"""

import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, write_json
from benchmarks.staleness_study.campaigns import OVER_STEPS, Row, measured, run_campaign, start_model
from benchmarks.staleness_study.plots import write_plots

_PRESET = Path("configs/presets/tiny-cpu.yaml")
_LOSSES = "aipo,ppo_clip,decoupled_ppo,reinforce"
_BOUNDS = "0,1,2,4,8,16"
_LEARNING_RATE = 2e-4
"""Half the preset's, at which AIPO overshoots (docs/decisions/0009)."""
_MEDIANS = ("accuracy", *OVER_STEPS, "seconds_per_step")


def main() -> None:
    """Runs what is missing of the study, prints its table, and writes figures and plots."""
    parser = make_parser(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the campaigns; finished ones are reused")
    parser.add_argument("--steps", type=int, default=150, help="optimizer steps of each campaign")
    parser.add_argument("--losses", default=_LOSSES, help=f"comma-separated (default: {_LOSSES})")
    parser.add_argument("--bounds", default=_BOUNDS, help=f"max_staleness, comma-separated (default: {_BOUNDS})")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each combination, from 0")
    parser.add_argument("--plots", type=Path, help="folder to write the plots to, as SVG")
    arguments = parser.parse_args()
    losses, bounds = arguments.losses.split(","), [int(bound) for bound in arguments.bounds.split(",")]
    rows = list(_study(arguments.root, losses, bounds, range(arguments.seeds), arguments.steps))
    cells = medians(rows)
    result = {
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "cells": cells,
        "rows": rows,
        "machine": machine(),
    }
    _print(cells, losses, bounds)
    write_json(arguments.json, result)
    if arguments.plots is not None:
        write_plots(cells, rows, arguments.plots)


def _study(root: Path, losses: Sequence[str], bounds: Sequence[int], seeds: range, steps: int) -> Iterator[Row]:
    """One row per campaign; seeds outermost, so that a study stopped early has every combination once."""
    start = start_model(root, _PRESET)
    for seed in seeds:
        for bound in bounds:
            for loss in losses:
                run = root / f"{loss}-{bound}-{seed}"
                settings = {
                    "seed": seed,
                    "model.path": str(start),
                    "training.loss": loss,
                    "training.max_importance_ratio": 2.0,
                    "training.learning_rate": _LEARNING_RATE,
                    "training.max_steps": steps,
                    "training.checkpoint_every": steps,
                    "staleness.max_staleness": bound,
                    "promotion.margin": None,
                    "evaluation.num_prompts": 512,
                }
                ended = run_campaign(run, _PRESET, settings)
                yield {"loss": loss, "max_staleness": bound, "seed": seed, **measured(run, ended)}


def medians(rows: Sequence[Row]) -> list[Row]:
    """For each loss and bound: the median over its seeds, and the lowest and highest accuracy.

    A campaign that did not finish counts with accuracy 0: it has no policy to use.
    """
    cells = []
    for loss, bound in dict.fromkeys((row["loss"], row["max_staleness"]) for row in rows):
        mine = [row for row in rows if (row["loss"], row["max_staleness"]) == (loss, bound)]
        accuracies = [row["accuracy"] or 0.0 for row in mine]
        cell: Row = {"loss": loss, "max_staleness": bound, "seeds": len(mine)}
        for name in _MEDIANS:
            found = accuracies if name == "accuracy" else [row[name] for row in mine if row[name] is not None]
            cell[name] = statistics.median(found) if found else None
        cell["accuracy_lowest"], cell["accuracy_highest"] = min(accuracies), max(accuracies)
        cells.append(cell)
    return cells


def _print(cells: Sequence[Row], losses: Sequence[str], bounds: Sequence[int]) -> None:
    by_name = {(cell["loss"], cell["max_staleness"]): cell for cell in cells}
    for name, title in (
        ("accuracy", "Held-out accuracy at the end, median (lowest–highest) over seeds"),
        ("effective_sample_size", "Effective sample size, mean over steps"),
        ("chi_square", "χ² of the policy from the one that sampled, mean over steps"),
        ("staleness_mean", "Measured staleness, policy versions"),
        ("seconds_per_step", "Seconds per optimizer step"),
    ):
        table = make_table(title, ["", *(f"η = {bound}" for bound in bounds)])
        for loss in losses:
            table.add_row(loss, *(_shown(by_name[loss, bound], name) for bound in bounds))
        Console(width=120).print(table)


def _shown(cell: Row, name: str) -> str:
    if cell[name] is None:
        return "–"
    if name != "accuracy":
        # Rounding may leave a sign on a 0.
        return f"{round(cell[name], 3) + 0.0:.3f}"
    return f"{cell['accuracy']:.3f} ({cell['accuracy_lowest']:.3f}–{cell['accuracy_highest']:.3f})"


if __name__ == "__main__":
    main()
