"""The planner, measured: predictions of this machine's campaigns, from a fit of two of them, against measurements.

    two runs ─► fit ─► costs of each other config ─► simulation ─► predicted ─┐
    each other config ─► campaign ─────────────────────────────► measured  ─┴─► a row

All stages are the real ones. The fit sees the two runs that it is fitted on and no other, and nothing is set by row. A
row whose model these runs do not have is predicted with the response lengths that its campaign had.

python -m benchmarks.planner [--runs FOLDER] [--only NAME …] [--json PATH]
"""

import json
import os
import random
import string
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean
from typing import Any

import pyarrow.compute as pc

from benchmarks.harness import as_settings, finish, make_parser, print_table, read_rows, run_campaign
from millrace.planning.measured import StageTimes, lengths_of, read_measured
from millrace.planning.simulation import simulate
from millrace.planning.stored import StoredMachine, fit_machine
from millrace.rollouts.consumed import TRAINED
from storage import layout
from storage.schema import CONSUMED
from storage.stores.factory import open_store

WITHIN, LEAST = 0.10, 10
"""Share by which step times may be off, and rows in which they have to be within it."""
_STEPS, _WARMUP = 200, 10
"""Of a simulation."""
_FIGURES = ("step_seconds", "staleness_mean", "dropped_share", "idle_train", "idle_generate", "idle_score")

Row = dict[str, Any]


LETTERS: Mapping[str, int] = {"tail": 22, "longer": 46}
"""Number of different letters in the prompts of a family: a model that was never trained draws from these, the end of
the response and two more tokens alike."""
_PROMPTS, _PROMPT_LETTERS, _MAX_TOKENS = 512, 12, 240
Settings = Mapping[str, object]

_SHARED: Settings = {
    # So low that lengths stay the same.
    "training.learning_rate": 1e-9,
    "training.checkpoint_every": 50,
    "evaluation.every": None,
    "promotion.margin": None,
    "prompts.num_eval": 8,
}
_TAIL: Settings = {
    **_SHARED,
    "generation.max_new_tokens": _MAX_TOKENS,
    "generation.groups_per_batch": 8,
    "training.groups_per_step": 8,
    "training.max_steps": 60,
}
FAMILIES: Mapping[str, Settings] = {
    "tiny": {**_SHARED, "training.max_steps": 150},
    "tail": _TAIL,
    "longer": {**_TAIL, "training.max_steps": 40},
}
UNTRAINED: Settings = {"model.warm_start_steps": 0}
"""How the start models are made whose lengths are geometric."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannerCase:
    """A config and its run."""

    name: str
    family: str
    settings: Settings = field(default_factory=dict)


FITTED: Sequence[PlannerCase] = (PlannerCase(name="tiny", family="tiny"), PlannerCase(name="tail", family="tail"))
"""The runs that the fit sees."""

PREDICTED: Sequence[PlannerCase] = (
    PlannerCase(name="tiny-bound-0", family="tiny", settings={"staleness.max_staleness": 0}),
    PlannerCase(name="tiny-bound-4", family="tiny", settings={"staleness.max_staleness": 4}),
    PlannerCase(name="tiny-sync", family="tiny", settings={"pipeline.mode": "sync"}),
    PlannerCase(name="tiny-2-generators", family="tiny", settings={"generation.replicas": 2}),
    PlannerCase(name="tiny-quarter-slots", family="tiny", settings={"generation.groups_per_batch": 8}),
    PlannerCase(name="tiny-half-batch", family="tiny", settings={"training.groups_per_step": 32}),
    PlannerCase(
        name="tiny-double-batch", family="tiny", settings={"training.groups_per_step": 128, "training.max_steps": 80}
    ),
    PlannerCase(name="tail-bound-0", family="tail", settings={"staleness.max_staleness": 0}),
    PlannerCase(name="tail-bound-1", family="tail", settings={"staleness.max_staleness": 1}),
    PlannerCase(
        name="tail-bound-4-drop", family="tail", settings={"staleness.max_staleness": 4, "staleness.too_old": "drop"}
    ),
    PlannerCase(name="tail-sync", family="tail", settings={"pipeline.mode": "sync"}),
    PlannerCase(name="tail-2-generators", family="tail", settings={"generation.replicas": 2}),
    PlannerCase(name="tail-half-slots", family="tail", settings={"generation.groups_per_batch": 4}),
    PlannerCase(name="tail-double-slots", family="tail", settings={"generation.groups_per_batch": 16}),
    PlannerCase(
        name="tail-double-batch", family="tail", settings={"training.groups_per_step": 16, "training.max_steps": 40}
    ),
    PlannerCase(name="tail-longer", family="longer"),
)
"""The runs that it predicts, each by its changes."""


def write_prompts(path: Path, letters: int) -> None:
    """Prompts of random letters. Long answers make room for those of the start model."""
    rng, alphabet = random.Random(0), string.ascii_letters[:letters]
    texts = ["".join(rng.choices(alphabet, k=_PROMPT_LETTERS)) for _ in range(_PROMPTS)]
    answer = alphabet[0] * _MAX_TOKENS
    path.write_text("".join(json.dumps({"prompt": text, "answer": answer}) + "\n" for text in texts))


def main() -> None:
    """Runs what has not been run, prints the table and writes it as JSON."""
    parser = make_parser(__doc__)
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
    }
    _print(rows)
    finish(arguments.json, result)


def _row(fitted: StoredMachine, case: PlannerCase, folder: Path) -> Row:
    run, measured = read_measured(open_store(str(folder))), figures(folder)
    lengths = (
        fitted.lengths(run.config) if case.family in {fit.family for fit in FITTED} else lengths_of([run], run.config)
    )
    outcome = simulate(run.config, fitted.costs(run.config), lengths, steps=_STEPS, warmup=_WARMUP)
    idle = {f"idle_{stage}": share for stage, share in outcome.idle.items()}
    return {
        "name": case.name,
        "changed": dict(case.settings),
        "measured": measured,
        "predicted": {name: idle[name] if name in idle else getattr(outcome, name) for name in _FIGURES},
        "step_ratio": outcome.step_seconds / measured["step_seconds"],
    }


def family_settings(root: Path, family: str) -> dict[str, object]:
    """Returns the settings of a family, with its prompts and its start model, which is made once."""
    shared: dict[str, object] = {}
    if family in LETTERS:
        prompts = root / f"{family}.jsonl"
        write_prompts(prompts, LETTERS[family])
        shared = {"prompts.source": str(prompts)}
    run = root / f"start-{family}"
    once = {"training.max_steps": 1, "promotion.margin": None}
    untrained = UNTRAINED if family in LETTERS else {}
    run_campaign(run, as_settings({**FAMILIES[family], **shared, **once, **untrained}))
    return {**FAMILIES[family], **shared, "model.path": str(run / layout.START_MODEL)}


def run_case(root: Path, case: PlannerCase) -> Path:
    """Runs a case, unless it has run already. Returns its folder."""
    run_campaign(root / case.name, as_settings({**family_settings(root, case.family), **case.settings}))
    return root / case.name


def figures(folder: Path) -> dict[str, float]:
    """Returns the figures of a finished run after its warm-up, named as those of `Outcome`."""
    run = read_measured(open_store(str(folder)))
    rows = read_rows(folder, layout.CONSUMED, CONSUMED)
    rows = rows.filter(pc.field("policy_version") > int(run.steps.policy_version[0]))
    trained = rows.filter(pc.field("outcome") == TRAINED)
    return {
        "step_seconds": run.step_seconds,
        "staleness_mean": pc.mean(trained["staleness"]).as_py(),
        "dropped_share": 1 - trained.num_rows / rows.num_rows,
        "idle_train": _idle_share(run.trainer),
        "idle_generate": fmean(map(_idle_share, run.generators)),
        "idle_score": fmean(map(_idle_share, run.scorers)),
    }


def _idle_share(times: StageTimes) -> float:
    """Returns the share of the time in which the stage waited for others."""
    waited = sum(spent for *_, span in times.spans for name, spent in span.items() if name.startswith("waiting"))
    return min(1.0, waited / (times.end - times.begin))


def _print(rows: Sequence[Row]) -> None:
    headings = ("", "s/step", "ratio", "stale", "dropped", "train", "generate", "score")
    lines = []
    for row in rows:
        pairs = [(row["predicted"][name], row["measured"][name]) for name in _FIGURES[1:]]
        seconds, ratio = row["measured"]["step_seconds"], row["step_ratio"]
        shares = [f"{predicted:.2f} {measured:.2f}" for predicted, measured in pairs]
        lines.append([row["name"], f"{seconds:.3f}", f"{ratio:.3f}", *shares])
    title = "Predicted and measured, idle shares by stage; the first two rows were fitted"
    print_table(title, headings, lines)


if __name__ == "__main__":
    main()
