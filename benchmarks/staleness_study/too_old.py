"""The cost of each `staleness.too_old` for learning: chains of sums, whose responses have a long tail of lengths.

    one start model ─► campaign drop, seed 0 ─┐
                   ├─► campaign wait, seed 0 ─┼─► one row per campaign ─► one cell per mode ─► table, JSON
                   └─► …                     ─┘

Each campaign is a real one, in its own folder under --root, so an interrupted study can be continued. Only the mode and
the seed differ: start model, prompts and learning rate are those of the preset. The generator has places for all groups
that the bound admits, so that it stays full behind a straggler. A campaign that diverged is a row too.

    python -m benchmarks.staleness_study.too_old --root FOLDER [--steps 60] [--modes drop,wait,mask] [--seeds 3]
"""

import json
import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, write_json
from benchmarks.staleness_study.campaigns import Row, measured, run_campaign, start_model
from benchmarks.staleness_study.lengths import CLASSES, mean_by_length, of_last_steps
from configs.load import load_config
from millrace.rollouts.consumed import read_consumed
from millrace.rollouts.ledger import Amount
from storage import layout
from storage.stores.factory import open_store

_PRESET = Path("configs/presets/chain-cpu.yaml")
_MODES = "drop,wait,mask"
_T = {2: 12.706, 3: 4.303, 4: 3.182, 5: 2.776, 6: 2.571, 7: 2.447, 8: 2.365, 9: 2.306, 10: 2.262}
"""97.5 % quantile of Student's t for the mean of so many seeds."""
_MEANS = (
    *("staleness_mean", "dropped_share", "masked_token_share", "length_ratio"),
    *("reward_taken", "seconds", "seconds_per_step"),
)
_LAST = 10
"""Steps at the end, over which rewards are averaged."""
_OF_A_MODE = {
    "reward_taken": ".3f",
    "length_ratio": ".3f",
    "dropped_share": ".1%",
    "masked_token_share": ".1%",
    "staleness_mean": ".2f",
    "seconds": ".0f",
}
_OF_A_CLASS = {"trained_share": ".0%", "masked_token_share": ".0%", "reward": ".3f"}


def main() -> None:
    """Runs what is missing of the study, prints its table, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the campaigns; finished ones are reused")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps of each campaign")
    parser.add_argument("--modes", default=_MODES, help=f"comma-separated (default: {_MODES})")
    parser.add_argument("--bound", type=int, default=1, help="max_staleness (default: 1)")
    parser.add_argument("--seeds", type=int, default=3, choices=_T, help="seeds of each mode, from 0")
    arguments = parser.parse_args()
    modes = arguments.modes.split(",")
    rows = list(_study(arguments.root, modes, arguments.bound, range(arguments.seeds), arguments.steps))
    cells = summarised(rows)
    result = {
        "steps": arguments.steps,
        "seeds": arguments.seeds,
        "max_staleness": arguments.bound,
        "cells": cells,
        "rows": rows,
        "machine": machine(),
    }
    _print(cells)
    write_json(arguments.json, result)


def _study(root: Path, modes: Sequence[str], bound: int, seeds: range, steps: int) -> Iterator[Row]:
    """One row per campaign; seeds outermost, so that a study stopped early has every mode once."""
    start = start_model(root, _PRESET)
    admitted = (bound + 1) * load_config(_PRESET).training.groups_per_step
    for seed in seeds:
        for mode in modes:
            run = root / f"{mode}-{bound}-{seed}"
            settings = {
                "seed": seed,
                "model.path": str(start),
                "training.max_steps": steps,
                "training.checkpoint_every": steps,
                "generation.groups_per_batch": admitted,
                "staleness.max_staleness": bound,
                "staleness.too_old": mode,
                "promotion.margin": None,
            }
            ended = run_campaign(run, _PRESET, settings)
            summary = json.loads((run / layout.SUMMARY).read_text()) if ended == 0 else None
            consumed = read_consumed(open_store(str(run))).to_pylist()
            yield {
                "too_old": mode,
                "max_staleness": bound,
                "seed": seed,
                **measured(run, ended),
                **taken(summary),
                **of_last_steps(consumed, _LAST),
            }


def taken(summary: Row | None) -> Row:
    """What became of the trajectories that the trainer took, from a campaign's summary; None if it has none."""
    if summary is None:
        return dict.fromkeys(("prompts", "dropped_share", "masked_token_share", "length_ratio", "seconds"))
    ledger = summary["ledger"]
    trained, masked = Amount.from_json(ledger["trained"]), Amount.from_json(ledger["masked"])
    stale = Amount.from_json(ledger["dropped"].get("stale", {}))
    both = trained + stale
    return {
        "prompts": summary["eval"]["end"]["prompts"],
        "dropped_share": stale.rollouts / both.rollouts,
        "masked_token_share": masked.tokens / trained.tokens,
        "length_ratio": (trained.tokens / trained.rollouts) / (both.tokens / both.rollouts),
        "seconds": summary["wall_seconds"],
    }


def summarised(rows: Sequence[Row]) -> list[Row]:
    """For each mode: the mean accuracy with a 95 % interval, and the means of the other figures over its seeds.

    Each mode but the first also has its difference to the first, in accuracy, seed by seed. A campaign that did not
    finish counts with accuracy 0: it has no policy to use.
    """
    cells = []
    first = [row["accuracy"] or 0.0 for row in rows if row["too_old"] == rows[0]["too_old"]]
    for mode in dict.fromkeys(row["too_old"] for row in rows):
        mine = [row for row in rows if row["too_old"] == mode]
        accuracies = [row["accuracy"] or 0.0 for row in mine]
        prompts = min((row["prompts"] for row in mine if row["prompts"] is not None), default=None)
        cell: Row = {"too_old": mode, "seeds": len(mine), "accuracies": accuracies}
        cell["accuracy"] = statistics.fmean(accuracies)
        cell["accuracy_interval"] = interval(accuracies, prompts)
        for name in _MEANS:
            found = [row[name] for row in mine if row[name] is not None]
            cell[name] = statistics.fmean(found) if found else None
        cell["by_length"] = mean_by_length([row["by_length"] for row in mine])
        if mode != rows[0]["too_old"] and len(accuracies) == len(first):
            differences = [here - there for here, there in zip(accuracies, first, strict=True)]
            cell["difference"] = statistics.fmean(differences)
            cell["difference_interval"] = interval(differences, None)
        cells.append(cell)
    return cells


def interval(values: Sequence[float], prompts: int | None) -> tuple[float, float]:
    """95 % interval of the mean of a figure per seed: Student's t over the seeds.

    With `prompts`, the number of held-out prompts behind each accuracy, their choice counts too, as it is the same for
    all seeds.
    """
    mean = statistics.fmean(values)
    over_seeds = _T[len(values)] * statistics.stdev(values) / math.sqrt(len(values)) if len(values) > 1 else 0.0
    over_prompts = 0.0 if prompts is None else 1.96 * math.sqrt(mean * (1 - mean) / prompts)
    half = math.hypot(over_seeds, over_prompts)
    return mean - half, mean + half


def _print(cells: Sequence[Row]) -> None:
    table = make_table(
        "What each staleness.too_old costs",
        [
            *("", "accuracy at the end", f"to {cells[0]['too_old']}", f"reward, last {_LAST}"),
            *("trained ÷ taken length", "dropped", "tokens masked", "staleness", "seconds"),
        ],
    )
    for cell in cells:
        table.add_row(cell["too_old"], *shown(cell))
    lengths = make_table(f"By number of sums, last {_LAST} steps", ["", "", "trained", "tokens masked", "reward"])
    for cell in cells:
        for name in CLASSES:
            lengths.add_row(cell["too_old"], name, *_formatted(cell["by_length"][name], _OF_A_CLASS))
    for printed in (table, lengths):
        Console(width=160).print(printed)


def shown(cell: Row) -> list[str]:
    """A cell of the table as text, in the order of its columns."""
    low, high = cell["accuracy_interval"]
    texts = [f"{cell['accuracy']:.3f} ({low:.3f}–{high:.3f})"]
    if "difference" in cell:
        low, high = cell["difference_interval"]
        texts.append(f"{cell['difference']:+.3f} ({low:+.3f} to {high:+.3f})")
    else:
        texts.append("–")
    return [*texts, *_formatted(cell, _OF_A_MODE)]


def _formatted(figures: Row, forms: Mapping[str, str]) -> list[str]:
    return ["–" if figures[name] is None else format(figures[name], form) for name, form in forms.items()]


if __name__ == "__main__":
    main()
