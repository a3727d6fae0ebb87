"""The planner, measured: predictions of this machine's campaigns, from a fit of two of them, against measurements.

    two runs ─► fit ─► costs of each other config ─► simulation ─► predicted ─┐
    each other config ─► campaign ─────────────────────────────► measured  ─┴─► a row

All stages are the real ones. The fit sees the two runs that it is fitted on and no other, and nothing is set by row. A
row whose model these runs do not have is predicted with the lengths of its own responses.

python -m benchmarks.planner [--runs FOLDER] [--only NAME …] [--json PATH]
"""

import argparse
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from benchmarks.planner.cases import FITTED, PREDICTED, Case
from benchmarks.planner.runs import figures, run_case
from benchmarks.report import machine, make_table, print_targets, write_json
from millrace.planning.measured import read_measured
from millrace.planning.simulation import simulate
from millrace.planning.stored import StoredMachine, fit_machine
from storage.stores.factory import open_store

WITHIN, LEAST = 0.10, 10
"""Share by which step times may be off, and rows in which they have to be within it."""
_STEPS, _WARMUP = 200, 10
"""Of a simulation."""
_FIGURES = ("step_seconds", "staleness_mean", "dropped_share", "idle_train", "idle_generate", "idle_score")

Row = dict[str, Any]


def main() -> None:
    """Runs what has not been run, prints the table and writes it as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, metavar="PATH", help="where to write the figures")
    parser.add_argument("--runs", type=Path, help="folder of the campaigns, kept and used again; else a temporary one")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="predict only these")
    arguments = parser.parse_args()
    cases = {case.name: case for case in PREDICTED}
    unknown = [name for name in arguments.only or () if name not in cases]
    if unknown:
        raise SystemExit(f"--only {unknown[0]}: expected some of {', '.join(cases)}")
    chosen = [case for case in PREDICTED if not arguments.only or case.name in arguments.only]
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as temporary:
        root = (arguments.runs or Path(temporary)).resolve()
        fitted = fit_machine([open_store(str(run_case(root, case))) for case in FITTED], cores=os.cpu_count())
        rows = [_row(fitted, case, run_case(root, case)) for case in (*FITTED, *chosen)]
    predicted = rows[len(FITTED) :]
    good = sum(abs(row["step_ratio"] - 1) <= WITHIN for row in predicted)
    targets = {f"step time within {WITHIN:.0%} in {good} of {len(predicted)} runs, {LEAST} wanted": good >= LEAST}
    result = {
        "fitted": rows[: len(FITTED)],
        "coefficients": {"engine": fitted.engine, "train": fitted.train},
        "rows": predicted,
        "targets": targets,
        "machine": machine(),
    }
    _print(rows, targets)
    write_json(arguments.json, result)


def _row(fitted: StoredMachine, case: Case, folder: Path) -> Row:
    run, measured = read_measured(open_store(str(folder))), figures(folder)
    lengths = fitted.lengths(run.config) if case.family in {fit.family for fit in FITTED} else run.lengths
    outcome = simulate(run.config, fitted.costs(run.config), lengths, steps=_STEPS, warmup=_WARMUP)
    idle = {f"idle_{stage}": share for stage, share in outcome.idle.items()}
    return {
        "name": case.name,
        "changed": dict(case.settings),
        "measured": measured,
        "predicted": {name: idle[name] if name in idle else getattr(outcome, name) for name in _FIGURES},
        "step_ratio": outcome.step_seconds / measured["step_seconds"],
    }


def _print(rows: Sequence[Row], targets: Mapping[str, bool]) -> None:
    headings = ("", "s/step", "ratio", "stale", "dropped", "train", "generate", "score")
    table = make_table("Predicted and measured, idle shares by stage; the first two rows were fitted", headings)
    for row in rows:
        pairs = [(row["predicted"][name], row["measured"][name]) for name in _FIGURES[1:]]
        table.add_row(
            row["name"],
            f"{row['measured']['step_seconds']:.3f}",
            f"{row['step_ratio']:.3f}",
            *(f"{predicted:.2f} {measured:.2f}" for predicted, measured in pairs),
        )
    console = Console()
    console.print(table)
    print_targets(console, targets)


if __name__ == "__main__":
    main()
