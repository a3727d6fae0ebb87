"""The campaigns of the benchmark, and their figures: one folder, in which finished ones stay."""

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from benchmarks.planner.cases import FAMILIES, LETTERS, PRESET, UNTRAINED, Case, write_prompts
from configs.schema import RunConfig
from millrace.generation.engines.transformers import TransformersEngine
from millrace.models.loading import load_model, load_tokenizer
from millrace.planning.durations import StoredLengths
from millrace.planning.fit.measured import Activities, MeasuredRun, read_measured
from millrace.prompts.dataset import load_prompts
from millrace.rewards.scorer import make_scorer
from millrace.rollouts.consumed import TRAINED
from millrace.rollouts.groups_in_flight import trajectory_seed
from millrace.types import Prompt, Request, Sampling
from storage import layout
from storage.schema import CONSUMED
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

_REWARDS, _ROUNDS, _RESPONSES = 50, 20, 1024
"""Measured alone."""


def family_settings(root: Path, family: str) -> dict[str, object]:
    """Of a family: its prompts and its start model, which is made once."""
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


def read_case(run: Path) -> MeasuredRun:
    """A finished run, without its warm-up."""
    return read_measured(open_store(str(run)))


def figures(run: Path) -> dict[str, float]:
    """Of a finished run, named as those of `Outcome`."""
    found = read_case(run)
    reader = StreamReader(open_store(str(run)), layout.CONSUMED, CONSUMED)
    rows = pa.concat_tables(part.table for part in reader.readable())
    rows = rows.filter(pc.field("policy_version") > int(found.steps.policy_version[0]))
    trained = rows.filter(pc.field("outcome") == TRAINED)
    return {
        "step_seconds": found.step_seconds,
        "staleness_mean": pc.mean(trained["staleness"]).as_py(),
        "dropped_share": 1 - trained.num_rows / rows.num_rows,
        "idle_train": _idle(found, [found.trainer]),
        "idle_generate": _idle(found, found.generators),
        "idle_score": _idle(found, found.scorers),
    }


def _idle(run: MeasuredRun, stages: Sequence[Activities]) -> float:
    return sum(stage.idle_share(run.begin, run.end) for stage in stages) / len(stages)


def reward_alone(config: RunConfig) -> float:
    """Seconds per rollout of a config's reward, measured alone: in the round that was disturbed least."""
    prompt = Prompt(prompt_id="0", text="1+1=", answer="2", source="arithmetic")
    pairs = [(prompt, "2")] * _REWARDS
    with make_scorer(config.scoring, config.prompts) as scorer:
        scorer.score_many(pairs)
        seconds = []
        for _ in range(_ROUNDS):
            started = time.perf_counter()
            scorer.score_many(pairs)
            seconds.append(time.perf_counter() - started)
        return min(seconds) / len(pairs)


def lengths_alone(config: RunConfig) -> StoredLengths:
    """Lengths of what a config's start model answers, sampled alone."""
    assert config.model.path is not None
    folder = Path(config.model.path)
    tokenizer = load_tokenizer(folder)
    engine = TransformersEngine(load_model(folder, config.model.dtype), tokenizer)
    text = load_prompts(config.prompts).train[0].text
    prompt = tuple(tokenizer(text)["input_ids"])
    requests = [
        Request(group_id=0, sample_index=k, prompt_tokens=prompt, seed=trajectory_seed(config.seed, 0, k))
        for k in range(_RESPONSES)
    ]
    engine.submit(requests, Sampling(temperature=1.0, top_p=1.0, max_new_tokens=config.generation.max_new_tokens))
    responses: list[int] = []
    while engine.in_flight:
        responses += [len(one.response.tokens) for one in engine.collect(1.0)]
    return StoredLengths(
        groups=[(len(prompt), responses)],
        group_size=config.generation.group_size,
        max_tokens=config.generation.max_new_tokens,
    )
