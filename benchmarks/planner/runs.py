"""The campaigns of the benchmark, and their figures: one folder, in which finished ones stay."""

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.planner.cases import FAMILIES, LETTERS, PRESET, UNTRAINED, Case, write_prompts
from millrace.planning.measured import StageTimes, read_measured
from millrace.rollouts.consumed import TRAINED
from storage import layout
from storage.schema import CONSUMED
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader


def family_settings(root: Path, family: str) -> dict[str, object]:
    """Returns the settings of a family, with its prompts and its start model, which is made once."""
    shared: dict[str, object] = {}
    if family in LETTERS:
        prompts = root / f"{family}.jsonl"
        write_prompts(prompts, LETTERS[family])
        shared = {"prompts.source": str(prompts)}
    run = root / f"start-{family}"
    once = {"training.max_steps": 1, "promotion.margin": None}
    run_campaign(run, {**FAMILIES[family], **shared, **once, **(UNTRAINED if family in LETTERS else {})})
    return {**FAMILIES[family], **shared, "model.path": str(run / layout.START_MODEL)}


def run_case(root: Path, case: Case) -> Path:
    """Runs a case, unless it has run already. Returns its folder."""
    run_campaign(root / case.name, {**family_settings(root, case.family), **case.settings})
    return root / case.name


def run_campaign(run: Path, settings: Mapping[str, object]) -> None:
    """Runs a campaign in its folder, unless it has run there to its end. Raises RuntimeError if it ends otherwise."""
    if (run / layout.SUMMARY).exists():
        return
    shutil.rmtree(run, ignore_errors=True)
    run.parent.mkdir(parents=True, exist_ok=True)
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    where = ["--root", str(run.parent), "--run-id", run.name]
    command = [sys.executable, "-m", "flows.cli.main", "run", PRESET, *where, *sets]
    with run.with_suffix(".log").open("w") as log:
        ended = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode
    if ended:
        raise RuntimeError(f"the campaign {run} ended with exit code {ended}; its output: {log.name}")


def figures(folder: Path) -> dict[str, float]:
    """Returns the figures of a finished run after its warm-up, named as those of `Outcome`."""
    store = open_store(str(folder))
    run = read_measured(store)
    rows = pa.concat_tables(part.table for part in StreamReader(store, layout.CONSUMED, CONSUMED).readable())
    rows = rows.filter(pc.field("policy_version") > int(run.steps.policy_version[0]))
    trained = rows.filter(pc.field("outcome") == TRAINED)
    return {
        "step_seconds": run.step_seconds,
        "staleness_mean": pc.mean(trained["staleness"]).as_py(),
        "dropped_share": 1 - trained.num_rows / rows.num_rows,
        "idle_train": run.trainer.idle_share(),
        "idle_generate": _mean_idle(run.generators),
        "idle_score": _mean_idle(run.scorers),
    }


def _mean_idle(stages: Sequence[StageTimes]) -> float:
    return sum(stage.idle_share() for stage in stages) / len(stages)
