"""What stragglers cost: campaigns of sleeping stages whose responses have log-normal lengths.

    case: spread σ of the lengths, bound η, B groups a step, C groups' places, staleness.too_old
      ├─► simulation ─────────────────────────────────────────────────────► expected ─┐
      └─► campaign: engine and trainer sleep, everything else is real ─► measured ─┴─► a row

    share     the campaign's steps per second ÷ those of its trainer alone, which is as fast as its engine alone
    loss      tokens that carried loss ÷ tokens that the engine could have sampled meanwhile
    length    mean length of the rollouts trained ÷ of all that the trainer took

Finished campaigns under --root are not run again.

    python -m benchmarks.long_tail [--quick] [--steps 40] [--step-seconds 6] [--root FOLDER] [--json PATH]
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from benchmarks.harness import finish, make_parser, print_table
from benchmarks.long_tail.campaign import measured, run_case
from benchmarks.long_tail.cases import GROUP_SIZE, MEAN_TOKENS, Case, all_cases
from benchmarks.long_tail.expected import expected

SHARES = {0.6: 0.95, 1.0: 0.90}
"""Least share of the best mode, by σ, at η = 4 and B = C."""
LENGTHS_AGREE = 0.01
"""Trained rollouts are as long as all rollouts to within this, in that mode."""
_BOUND = 4

Row = dict[str, Any]


def main() -> None:
    """Runs the campaigns, prints the table and writes it as JSON."""
    parser = make_parser(__doc__)
    parser.add_argument("--groups", type=int, default=64, help="groups per optimizer step, B")
    parser.add_argument("--steps", type=int, default=40, help="optimizer steps of each campaign")
    parser.add_argument("--warmup", type=int, default=10, help="first steps that do not count")
    parser.add_argument("--step-seconds", type=float, default=6.0, help="sleep of the trainer per step")
    parser.add_argument("--quick", action="store_true", help="only σ = 0.6 with C = B")
    parser.add_argument("--root", type=Path, help="folder of the campaigns, kept; by default a temporary one")
    arguments = parser.parse_args()
    if arguments.steps < arguments.warmup + 2:
        parser.error(f"--steps is {arguments.steps}; expected at least two more than --warmup, {arguments.warmup}")
    cases = all_cases(arguments.groups)
    if arguments.quick:
        cases = [case for case in cases if case.sigma == 0.6 and _is_square(case)]
    lengths = {"step_seconds": arguments.step_seconds, "steps": arguments.steps, "warmup": arguments.warmup}
    with tempfile.TemporaryDirectory(prefix="millrace-benchmark-") as temporary:
        root = (arguments.root or Path(temporary)).resolve()
        root.mkdir(parents=True, exist_ok=True)
        rows = [_row(case, root=root, **lengths) for case in cases]
    result = {
        "group_size": GROUP_SIZE,
        "mean_tokens": MEAN_TOKENS,
        **lengths,
        "rows": rows,
        "targets": targets_met(rows),
    }
    _print(rows)
    finish(arguments.json, result)


def _row(case: Case, *, root: Path, step_seconds: float, steps: int, warmup: int) -> Row:
    simulated = expected(case, steps=steps, warmup=warmup)
    run = run_case(case, root, step_seconds=step_seconds, steps=steps)
    tail = case.pace(step_seconds).long_tail
    assert tail is not None
    figures = measured(run, tail, step_seconds=step_seconds, warmup=warmup)
    return {**asdict(case), "expected": asdict(simulated), "measured": figures}


def _is_square(case: Case) -> bool:
    return case.groups_per_batch == case.groups_per_step


def targets_met(rows: Sequence[Row]) -> dict[str, bool]:
    """For each σ with a target: does a mode reach the share without preferring short responses?"""
    square = [
        row for row in rows if row["max_staleness"] == _BOUND and row["groups_per_batch"] == row["groups_per_step"]
    ]
    met = {}
    for sigma, least in SHARES.items():
        modes = [
            row["mode"]
            for row in square
            if row["sigma"] == sigma
            and row["measured"]["share"] >= least
            and abs(row["measured"]["length_ratio"] - 1) <= LENGTHS_AGREE
        ]
        name = f"σ = {sigma}: {least:.0%} of the ideal, lengths within {LENGTHS_AGREE:.0%}"
        met[f"{name} ({', '.join(modes) or 'no mode'})"] = bool(modes)
    return met


def _print(rows: Sequence[Row]) -> None:
    headings = ("", "share", "expected", "dropped", "masked", "loss", "stale", "length", "idle")
    title = "Measured after the warm-up; idle: of the engine's places"
    lines = []
    for row in rows:
        figures, batches = row["measured"], row["groups_per_batch"] // row["groups_per_step"]
        lines.append(
            [
                f"σ {row['sigma']:g}, η {row['max_staleness']}, C = {batches} B, {row['mode']}",
                *(f"{figures['share']:.3f}", f"{row['expected']['share']:.3f}"),
                *(f"{figures[name]:.3f}" for name in ("dropped_share", "masked_token_share", "loss_share")),
                f"{figures['staleness_mean']:.1f}, {figures['staleness_max']}",
                *(f"{figures[name]:.3f}" for name in ("length_ratio", "engine_idle")),
            ]
        )
    print_table(title, headings, lines)


if __name__ == "__main__":
    main()
