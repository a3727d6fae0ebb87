"""Adaptive control against fixed bounds: accuracy over wall time, undisturbed and with stages that slow down.

    one start model per task ─► campaign fixed 1, seed 0  ─┐
                             ├─► campaign adaptive, seed 0 ─┼─► seconds to the target accuracy, seconds per phase
                             └─► …                         ─┘   ─► medians over seeds ─► table, JSON

Tasks are the presets `tiny` (responses of three tokens) and `chain` (a long tail of lengths, with a generator that has
places for up to three steps' groups). Each campaign is a real one in its own folder under --root, so an interrupted
study can be continued. Time begins when the first step is done. With --disturbed, a generator has a quarter of its
speed from a fifth to two fifths of the steps, and a reward takes seconds from three fifths to four fifths.

    python -m benchmarks.staleness_study.control --root FOLDER [--tasks tiny,chain] [--bounds 1,2,4,8] [--seeds 3]
"""

import json
import os
import statistics
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from rich.console import Console

from benchmarks.report import machine, make_parser, make_table, write_json
from benchmarks.staleness_study.campaigns import Row, run_campaign, start_model
from benchmarks.staleness_study.comparison import ADAPTIVE, against_best, phase_losses
from benchmarks.staleness_study.curves import write_curves
from benchmarks.staleness_study.disturbances import Phase, disturbed
from benchmarks.staleness_study.predicted import predicted_seconds_per_step
from benchmarks.staleness_study.time_to_accuracy import EVALUATIONS, reached, smoothed
from millrace.evaluation.results import ResultsReader
from millrace.runs.decisions import read_decisions
from millrace.runs.history import read_steps
from storage import layout
from storage.stores.factory import open_store

_PRESETS = {name: Path(f"configs/presets/{name}-cpu.yaml") for name in ("tiny", "chain")}
_SETTINGS: Mapping[str, Mapping[str, object]] = {
    # Half the preset's learning rate, at which AIPO overshoots (docs/decisions/0009).
    "tiny": {"training.learning_rate": 2e-4, "evaluation.every": 10},
    "chain": {"evaluation.every": 5},
}
_STEPS = {"tiny": 150, "chain": 80}
_TARGETS = {"tiny": 0.65, "chain": 0.75}
"""Held-out accuracy, as a mean of `EVALUATIONS` in a row."""
_CHAIN_GROUPS = 16
"""Groups per step of the chain task."""
_HIGHEST = 8
"""Highest bound of adaptive control."""


def main() -> None:
    """Runs what is missing of the study, prints its tables, and writes the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--root", type=Path, required=True, help="folder of the campaigns; finished ones are reused")
    parser.add_argument("--tasks", default="tiny,chain", help="comma-separated (default: tiny,chain)")
    parser.add_argument("--bounds", default="1,2,4,8", help="fixed bounds, comma-separated (default: 1,2,4,8)")
    parser.add_argument("--losses", default="aipo", help="comma-separated (default: aipo)")
    parser.add_argument("--seeds", type=int, default=3, help="seeds of each, from 0")
    parser.add_argument("--disturbed", action="store_true", help="slow stages down for some steps")
    parser.add_argument("--plot", type=Path, metavar="FILE", help="draw the learning curves as SVG")
    arguments = parser.parse_args()
    bounds = [*arguments.bounds.split(","), ADAPTIVE]
    rows = list(
        _study(
            arguments.root,
            arguments.tasks.split(","),
            arguments.losses.split(","),
            bounds,
            range(arguments.seeds),
            disturb=arguments.disturbed,
        )
    )
    cells = medians(rows)
    if not arguments.disturbed:
        _add_predictions(cells, arguments.root)
    compared, lost = against_best(cells), phase_losses(cells)
    _print(cells, lost)
    _print_comparison(compared)
    if arguments.plot:
        write_curves([row for row in rows if row["loss"] == rows[0]["loss"]], _TARGETS, arguments.plot)
    write_json(
        arguments.json,
        {
            "seeds": arguments.seeds, "cells": cells, "against_best": compared, "phase_losses": lost, "rows": rows,
            "machine": machine(),
        },
    )  # fmt: skip


def phases(steps: int) -> list[Phase]:
    """What slows down in a disturbed campaign of so many steps."""
    fifth = steps // 5
    return [
        Phase(
            name="slow generator", stage="generate", first=fifth, last=2 * fifth, stopped_seconds=0.15,
            running_seconds=0.05,
        ),
        Phase(
            name="slow reward", stage="score", first=3 * fifth, last=4 * fifth, stopped_seconds=2.0,
            running_seconds=0.2,
        ),
    ]  # fmt: skip


def _study(
    root: Path, tasks: Sequence[str], losses: Sequence[str], bounds: Sequence[str], seeds: range, *, disturb: bool
) -> Iterator[Row]:
    """One row per campaign; seeds outermost, so that a study stopped early has every bound once."""
    starts = {task: start_model(root / task, _PRESETS[task]) for task in tasks}
    for seed in seeds:
        for task in tasks:
            for loss in losses:
                for bound in bounds:
                    name = f"{loss}-{bound}-{seed}" + ("-disturbed" if disturb else "")
                    run = root / task / name
                    slow = phases(_STEPS[task]) if disturb else []
                    with disturbed(run, slow):
                        ended = run_campaign(run, _PRESETS[task], _settings(task, loss, bound, seed, starts[task]))
                    yield {"task": task, "loss": loss, "bound": bound, "seed": seed, **measured(run, task, slow, ended)}


def _settings(task: str, loss: str, bound: str, seed: int, start: Path) -> dict[str, object]:
    control: dict[str, object] = (
        {"staleness.control": "adaptive", "staleness.max_staleness": _HIGHEST}
        if bound == ADAPTIVE
        else {"staleness.max_staleness": int(bound)}
    )
    admitted = 1 + (_HIGHEST if bound == ADAPTIVE else int(bound))
    return {
        "seed": seed,
        "model.path": str(start),
        "training.loss": loss,
        "training.max_importance_ratio": 2.0,
        "training.max_steps": _STEPS[task],
        "training.checkpoint_every": _STEPS[task],
        "promotion.margin": None,
        **_SETTINGS[task],
        **control,
        **({"generation.groups_per_batch": _CHAIN_GROUPS * min(3, admitted)} if task == "chain" else {}),
    }


def measured(run: Path, task: str, slow: Sequence[Phase], exit_code: int) -> Row:
    """The figures of a campaign. `seconds_to_target` is None if it never came to the target."""
    store = open_store(str(run))
    steps = read_steps(store)
    at = {step.policy_version: step.t - steps[0].t for step in steps}
    results = ResultsReader(store).read()
    over_steps = [(one["policy_version"], one["accuracy"]) for one in results]
    curve = [(at.get(version, 0.0), accuracy) for version, accuracy in over_steps]
    if not steps:
        raise RuntimeError(f"the campaign in {run} ended with exit code {exit_code} before its first step")
    last = steps[-1].policy_version
    edges = sorted({1, last, *(edge for phase in slow for edge in (phase.first, phase.last))})
    names = {phase.first: phase.name for phase in slow}
    summary = json.loads((run / layout.SUMMARY).read_text()) if exit_code == 0 else {}
    return {
        "exit_code": exit_code,
        "accuracy": summary["eval"]["end"]["accuracy"] if summary else None,
        "seconds": at[last],
        "seconds_to_target": reached(smoothed(curve), _TARGETS[task]),
        "phases": [
            {
                "name": names.get(first, "as ever"),
                "first": first,
                "seconds_per_step": (at[end] - at[first]) / (end - first),
            }
            for first, end in pairwise(edges)
        ],
        "staleness_mean": statistics.fmean(step.values.get("staleness_mean", 0.0) for step in steps),
        "bounds": [step.values.get("max_staleness") for step in steps],
        "decisions": [[one.policy_version, one.action, one.max_staleness, one.reason] for one in read_decisions(store)],
        "curve": curve,
        "curve_over_steps": over_steps,
    }


def medians(rows: Sequence[Row]) -> list[Row]:
    """For each task, loss and bound: medians over its seeds, and the lowest and highest time to the target."""
    cells = []
    for task, loss, bound in dict.fromkeys((row["task"], row["loss"], row["bound"]) for row in rows):
        mine = [row for row in rows if (row["task"], row["loss"], row["bound"]) == (task, loss, bound)]
        times = [row["seconds_to_target"] for row in mine]
        found = [time for time in times if time is not None]
        cell: Row = {"task": task, "loss": loss, "bound": bound, "seeds": len(mine), "reached": len(found)}
        cell["seconds_to_target"] = statistics.median(found) if found else None
        cell["all_seconds_to_target"] = times
        for name in ("accuracy", "seconds", "staleness_mean"):
            values = [row[name] for row in mine if row[name] is not None]
            cell[name] = statistics.median(values) if values else None
        cell["phases"] = [
            {"name": same[0]["name"], "seconds_per_step": statistics.median(one["seconds_per_step"] for one in same)}
            for same in zip(*(row["phases"] for row in mine), strict=False)
        ]
        cells.append(cell)
    return cells


def _add_predictions(cells: Sequence[Row], root: Path) -> None:
    """Adds the planner's seconds per step to the cells of fixed bounds."""
    for task, loss in dict.fromkeys((cell["task"], cell["loss"]) for cell in cells):
        # Nothing overlaps with a bound of 0, so it is no asynchronous run.
        mine = [
            cell for cell in cells
            if (cell["task"], cell["loss"]) == (task, loss) and cell["bound"] not in (ADAPTIVE, "0")
        ]  # fmt: skip
        runs = {int(cell["bound"]): root / task / f"{loss}-{cell['bound']}-0" for cell in mine}
        expected = predicted_seconds_per_step(runs, os.cpu_count()) if len(runs) > 1 else {}
        for cell in mine:
            cell["predicted_seconds_per_step"] = expected.get(int(cell["bound"]))


def _print_comparison(compared: Sequence[Row]) -> None:
    table = make_table("Seconds to the target, adaptive ÷ best fixed bound", ["", "", "best", "ratio", "95 %"])
    for row in compared:
        ends = "–" if row["interval"] is None else "{:.2f} to {:.2f}".format(*row["interval"])
        table.add_row(row["task"], row["loss"], row["best"], _shown(row["ratio"], ".2f"), ends)
    Console().print(table)


def _print(cells: Sequence[Row], lost: Sequence[Row]) -> None:
    for task in dict.fromkeys(cell["task"] for cell in cells):
        mine = [cell for cell in cells if cell["task"] == task]
        table = make_table(
            f"{task}: to an accuracy of {_TARGETS[task]:g} over {EVALUATIONS} evaluations, medians",
            [
                *("", "", "reached", "seconds to target", "each", "accuracy at the end", "seconds", "staleness"),
                "planned s/step",
                *(f"{phase['name']}, s/step" for phase in mine[0]["phases"]),
                "most lost in a phase",
            ],
        )
        for cell, losses in ((cell, ratios) for cell, ratios in zip(cells, lost, strict=True) if cell in mine):
            table.add_row(
                cell["loss"],
                cell["bound"],
                f"{cell['reached']} of {cell['seeds']}",
                _shown(cell["seconds_to_target"], ".1f"),
                " ".join(_shown(time, ".1f") for time in cell["all_seconds_to_target"]),
                _shown(cell["accuracy"], ".3f"),
                _shown(cell["seconds"], ".1f"),
                _shown(cell["staleness_mean"], ".2f"),
                _shown(cell.get("predicted_seconds_per_step"), ".3f"),
                *(f"{phase['seconds_per_step']:.3f}" for phase in cell["phases"]),
                f"{losses['largest'] - 1:+.0%}",
            )
        Console(width=200).print(table)


def _shown(value: float | None, form: str) -> str:
    return "–" if value is None else format(value, form)


if __name__ == "__main__":
    main()
