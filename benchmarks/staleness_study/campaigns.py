"""Campaigns of a study: one start model for all, a folder each, and what was measured in them.

A finished campaign is not run again and an interrupted one is resumed, so a study continues where it stopped.
"""

import json
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

from millrace.runs.history import read_steps
from storage import layout
from storage.stores.factory import open_store

OVER_STEPS = ("staleness_mean", "effective_sample_size", "chi_square")
"""Metrics of a campaign that are averaged over its steps."""

Row = dict[str, Any]
"""The figures of one campaign, or of several with the same settings, by name."""


def start_model(root: Path, preset: Path) -> Path:
    """The preset's own start model, made once for all campaigns under `root`."""
    donor = root / "start"
    ended = run_campaign(donor, preset, {"training.max_steps": 1, "promotion.margin": None})
    if ended:
        raise RuntimeError(f"{donor}: the campaign that makes the start model ended with exit code {ended}")
    return donor / layout.START_MODEL


def run_campaign(run: Path, preset: Path, settings: dict[str, object]) -> int:
    """Its exit code. `run` is its folder."""
    if (run / layout.SUMMARY).exists():
        return 0
    sets = [part for key, value in settings.items() for part in ("--set", f"{key}={json.dumps(value)}")]
    command = [
        sys.executable,
        "-m",
        "flows.cli.main",
        "run",
        str(preset),
        "--root",
        str(run.parent),
        "--run-id",
        run.name,
    ]
    command += ["--resume"] if (run / layout.RUN).exists() else []
    return subprocess.run([*command, *sets], stdout=sys.stderr, check=False).returncode


def measured(run: Path, exit_code: int = 0) -> Row:
    """The figures of a campaign; `accuracy` is None if it ended before its last step."""
    steps = [step for step in read_steps(open_store(str(run))) if "effective_sample_size" in step.values]
    done = exit_code == 0
    summary = json.loads((run / layout.SUMMARY).read_text()) if done else {}
    seconds = [step.t for step in steps]
    return {
        "exit_code": exit_code,
        "steps": len(steps),
        "accuracy": summary["eval"]["end"]["accuracy"] if done else None,
        "start_accuracy": summary["eval"]["start"]["accuracy"] if done else None,
        **{name: statistics.fmean(step.values[name] for step in steps) if steps else None for name in OVER_STEPS},
        "seconds_per_step": (seconds[-1] - seconds[0]) / (len(seconds) - 1) if len(seconds) > 1 else None,
        "reward_mean": [step.values["reward_mean"] for step in steps],
    }
