"""The planner against measurements that others published.

a system's first row ─► its trainers' MFU, the only fit ─► all its rows: predicted ÷ published
staleness: concurrency, batch, queue, speeds, tail ─► mean staleness, predicted ÷ measured; nothing is fitted
"""

import argparse
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.planner.applied_compute import ROWS, StalenessRow
from benchmarks.planner.systems import Published, fitted_mfu, published_runs
from benchmarks.report import machine, make_table, print_targets, write_json

_CLOSE = 0.15
"""Rows whose prediction is off by no more than this count as close."""

Row = dict[str, Any]


def add_parser(commands: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """The command `published`."""
    parser = commands.add_parser("published", help=__doc__.partition("\n")[0], description=__doc__)
    parser.add_argument("--json", type=Path, help="where to write the figures")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Computes and prints the tables."""
    steps = step_rows(published_runs())
    staleness = staleness_rows(ROWS)
    console = Console(width=160)
    _print_steps(console, steps)
    _print_staleness(console, staleness)
    targets = {
        f"{_count_close(rows)} of {len(rows)} {what} within {_CLOSE:.0%}": _count_close(rows) == len(rows)
        for what, rows in (("step times", steps), ("staleness rows", staleness))
    }
    print_targets(console, targets)
    write_json(
        arguments.json,
        {
            "steps": steps,
            "staleness": staleness,
            "targets": targets,
            "machine": machine(),
        },
    )


def step_rows(runs: Sequence[Published]) -> list[Row]:
    """Predicted beside published seconds per step."""
    mfus = {system: fitted_mfu([run for run in runs if run.system == system]) for system in {r.system for r in runs}}
    rows = []
    for one in runs:
        outcome = one.outcome(mfus[one.system])
        predicted = outcome.step_seconds * one.steps_in_one
        rows.append(
            {
                "system": one.system,
                "name": one.name,
                "mfu": mfus[one.system],
                "predicted": predicted,
                "published": one.seconds,
                "ratio": predicted / one.seconds,
                "train_idle": outcome.idle["train"],
                "generate_idle": outcome.idle["generate"],
                "staleness": outcome.staleness_mean,
                "generation": predicted * (1 - outcome.idle["generate"]),
                "training": predicted * (1 - outcome.idle["train"]),
                "published_phases": one.phases,
            }
        )
    return rows


def staleness_rows(rows: Sequence[StalenessRow]) -> list[Row]:
    """Predicted beside measured mean staleness."""
    found = []
    for one in rows:
        predicted = one.predicted()
        here = {"bound": one.bound, "formula": one.formula, "predicted": predicted, "ratio": predicted / one.measured}
        found.append({**asdict(one), **here})
    return found


def _count_close(rows: Sequence[Row]) -> int:
    return sum(abs(row["ratio"] - 1) <= _CLOSE for row in rows)


def _print_steps(console: Console, rows: Sequence[Row]) -> None:
    headings = ("", "MFU", "predicted, s", "published, s", "ratio", "generation", "training")
    table = make_table("Seconds per step; of phases, in brackets as published", headings)
    for row in rows:
        table.add_row(
            f"{row['system']}, {row['name']}",
            f"{row['mfu']:.3f}",
            f"{row['predicted']:.1f}",
            f"{row['published']:.1f}",
            f"{row['ratio']:.2f}",
            *(
                f"{row[name]:.0f}" + ("" if row["published_phases"] is None else f" ({row['published_phases'][i]:.0f})")
                for i, name in enumerate(("generation", "training"))
            ),
        )
    console.print(table)


def _print_staleness(console: Console, rows: Sequence[Row]) -> None:
    table = make_table(
        "Mean staleness, Applied Compute",
        ("C, B, q, ρ, M", "bound here", "predicted", "measured", "ratio", "their formula"),
    )
    for row in rows:
        table.add_row(
            f"{row['concurrency']}, {row['batch']}, {row['queue']}, {row['speed']}, {row['tail']}",
            str(row["bound"]),
            f"{row['predicted']:.2f}",
            f"{row['measured']:.2f}",
            f"{row['ratio']:.2f}",
            f"{row['formula']:.2f}",
        )
    console.print(table)
