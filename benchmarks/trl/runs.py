"""One run of each side on the same prompts, from the same model, for as many steps."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness import run_campaign
from benchmarks.trl.shapes import GROUP_SIZE, Shape
from millrace.runs.history import read_steps
from storage.stores.factory import open_store

TRL = "trl==1.16.0"

_CONSTRAINTS = Path("constraints.txt")
_STAMP = "requirements-installed.txt"
"""Written last, so an environment without it is half-made."""
_EVALUATED = 16
"""Prompts of the evaluations before and after training, which are not timed."""


@dataclass(frozen=True, kw_only=True)
class TimedStep:
    """One optimizer step."""

    t: float
    """When it ended, unix seconds."""
    reward: float
    """Mean over its responses."""
    response_tokens: float
    """Mean over its responses."""


def run_trl(
    python: Path, shape: Shape, model: Path, prompts: Path, folder: Path, *, steps: int, seed: int
) -> list[TimedStep]:
    """TRL's steps, with a thread per core. Raises CalledProcessError if it fails."""
    folder.mkdir(parents=True)
    spec = {
        "model": str(model),
        "prompts": str(prompts),
        "output": str(folder / "output"),
        "steps_file": str(folder / "steps.jsonl"),
        "threads": os.cpu_count(),
        "seed": seed,
        "steps": steps,
        "responses": shape.responses,
        "group_size": GROUP_SIZE,
        "max_new_tokens": shape.max_new_tokens,
        "learning_rate": shape.learning_rate,
    }
    (folder / "spec.json").write_text(json.dumps(spec))
    # Not the module's package: that would put Millrace on the path.
    command = [str(python), str(Path(__file__).with_name("driver.py")), str(folder / "spec.json")]
    environment = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "OMP_NUM_THREADS")}
    subprocess.run(command, check=True, stdout=sys.stderr, env={**environment, "HF_HUB_OFFLINE": "1"})
    return [TimedStep(**json.loads(line)) for line in (folder / "steps.jsonl").read_text().splitlines()]


def run_millrace(
    shape: Shape, model: Path, prompts: Path, run: Path, *, steps: int, seed: int, settings: Sequence[str]
) -> tuple[list[TimedStep], dict[str, float]]:
    """The steps of a campaign in the folder `run`, with one thread for each stage, and busy seconds per step by stage.

    Raises RuntimeError if it fails.
    """
    run.parent.mkdir(parents=True, exist_ok=True)
    evaluated = run.parent / "evaluated.jsonl"
    evaluated.write_text("".join(prompts.read_text().splitlines(keepends=True)[:_EVALUATED]))
    groups = shape.responses // GROUP_SIZE
    ours = {
        "seed": seed,
        "model.path": model,
        "prompts.source": prompts,
        "prompts.eval_source": evaluated,
        "generation.group_size": GROUP_SIZE,
        "generation.groups_per_batch": groups,
        "generation.max_new_tokens": shape.max_new_tokens,
        "training.groups_per_step": groups,
        "training.learning_rate": shape.learning_rate,
        "training.max_steps": steps,
        "training.checkpoint_every": steps,
        "evaluation.every": "null",
        "promotion.margin": "null",
    }
    summary = run_campaign(run, [*(f"{key}={value}" for key, value in ours.items()), *settings])
    records = [
        TimedStep(
            t=step.t, reward=step.values["reward_mean"], response_tokens=step.values["response_length_mean_tokens"]
        )
        for step in read_steps(open_store(str(run)))
        if "reward_mean" in step.values
    ]
    stages = ("generate", "score", "train", "sync")
    return records, {stage: summary["seconds"][stage] / summary["steps"] for stage in stages}


def environment(folder: Path) -> Path:
    """The python of the environment in `folder`, which is made if it is missing; that takes some minutes."""
    torch = torch_requirement(_CONSTRAINTS.read_text())
    requirements = f"{torch}\n{TRL}\n"
    python, stamp = folder / "bin" / "python", folder / _STAMP
    if not stamp.exists() or stamp.read_text() != requirements:
        subprocess.run([sys.executable, "-m", "venv", "--clear", str(folder)], check=True)
        _install_torch(python, torch)
        _pip(python, TRL)
        stamp.write_text(requirements)
    return python


def torch_requirement(constraints: str) -> str:
    """The line of the tested version of torch, such as `torch==2.13.0`."""
    (line,) = re.findall(r"^torch==\S+", constraints, re.MULTILINE)
    return str(line)


def _install_torch(python: Path, torch: str) -> None:
    """Where pip would take the build with CUDA, uv takes the one for CPUs."""
    report = _pip(python, "--dry-run", "--ignore-installed", "--no-deps", "--report", "-", torch)
    if re.search(r'"(nvidia|cuda)-', report):
        _pip(python, "uv")
        uv = [str(python.with_name("uv")), "pip", "install", "--python", str(python), "--torch-backend", "cpu"]
        subprocess.run([*uv, torch], check=True)
    else:
        _pip(python, torch)


def _pip(python: Path, *arguments: str) -> str:
    """Returns the output of `pip install`; its errors go to stderr."""
    command = [str(python), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
    command += ["--constraint", str(_CONSTRAINTS), *arguments]
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


Figures = dict[str, Any]

SPEEDUP = 2.0
"""Target: TRL's seconds per step over Millrace's."""
REWARD_MARGIN = 0.05
"""Rewards this far apart count as equal. The mean over a quarter of a run varies by about half of it between seeds."""
_LAST_SHARE = 0.25
"""Share of a run's steps over which rewards are averaged."""


def of_run(steps: Sequence[TimedStep], shape: Shape, warmup: int) -> Figures:
    """Speed after the first `warmup` steps, and the mean reward of the last quarter of the steps."""
    timed = steps[warmup:]
    seconds = steps[-1].t - steps[warmup - 1].t
    tokens = sum(shape.responses * (shape.prompt_tokens + step.response_tokens) for step in timed)
    return {
        "seconds_per_step": seconds / len(timed),
        "tokens_per_second": tokens / seconds,
        "response_tokens": fmean(step.response_tokens for step in timed),
        "reward_first": steps[0].reward,
        "reward_last": _reward(steps, len(steps)),
        "steps": [asdict(step) for step in steps],
    }


def of_pair(trl: Sequence[TimedStep], millrace: Sequence[TimedStep], shape: Shape, warmup: int) -> Figures:
    """Both runs, the speed-up, and the rewards after the time in which the faster one ended, from its first step on."""
    seconds = min(steps[-1].t - steps[0].t for steps in (trl, millrace))
    runs = {"trl": of_run(trl, shape, warmup), "millrace": of_run(millrace, shape, warmup)}
    for name, steps in (("trl", trl), ("millrace", millrace)):
        runs[name]["reward_after_equal_time"] = _reward(steps, sum(step.t - steps[0].t <= seconds for step in steps))
    return {
        **runs,
        "equal_seconds": seconds,
        "speedup": runs["trl"]["seconds_per_step"] / runs["millrace"]["seconds_per_step"],
        "tokens_speedup": runs["millrace"]["tokens_per_second"] / runs["trl"]["tokens_per_second"],
    }


def of_pairs(pairs: Sequence[Figures]) -> Figures:
    """Medians over the pairs, and the pairs themselves."""
    sides = {
        side: {name: median(pair[side][name] for pair in pairs) for name in pairs[0][side] if name != "steps"}
        for side in ("trl", "millrace")
    }
    return {
        **sides,
        "speedup": median(pair["speedup"] for pair in pairs),
        "tokens_speedup": median(pair["tokens_speedup"] for pair in pairs),
        "pairs": list(pairs),
    }


def targets_met(shapes: dict[str, Figures]) -> dict[str, bool]:
    """Returns whether each target is met."""
    targets = {}
    for name, figures in shapes.items():
        rewards = [figures[side]["reward_last"] for side in ("millrace", "trl")]
        targets[f"{name}: {figures['speedup']:.2f} × TRL's speed, at least {SPEEDUP:.0f} ×"] = (
            figures["speedup"] >= SPEEDUP
        )
        targets[f"{name}: reward {rewards[0]:.3f} after as many steps, TRL's {rewards[1]:.3f}"] = (
            rewards[0] >= rewards[1] - REWARD_MARGIN
        )
    return targets


def _reward(steps: Sequence[TimedStep], end: int) -> float:
    """Mean over a window of steps that ends before step `end`; the window is a share of the whole run."""
    window = max(1, round(len(steps) * _LAST_SHARE))
    return fmean(step.reward for step in steps[max(0, end - window) : end])
