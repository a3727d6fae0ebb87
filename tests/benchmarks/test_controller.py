"""The arithmetic of the benchmark, and one short campaign of sleeping stages."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY

from benchmarks.controller import PHASES, Campaign, Footprint, report
from benchmarks.sleeping.pace import Pace

_STEPS = 5
_SLEEPS = {"generate": 0.2, "score": 0.1, "train": 0.15}


def _look(cpu_seconds: float, events: int) -> Footprint:
    return Footprint(
        controller_cpu_seconds=cpu_seconds,
        server_cpu_seconds=2 * cpu_seconds,
        rows={"events": events, "block_type": 30},
    )


def test_a_campaign_is_held_against_its_slowest_stage() -> None:
    result = report(
        Campaign(
            called=100.0,
            ready=110.0,
            steps=[111.0, 111.6, 112.25],
            returned=120.0,
            footprints=(_look(1.0, 7), _look(1.5, 9), _look(1.75, 10), _look(2.0, 14)),
            busy_seconds={"generate": 1.5},
        ),
        Pace(generate=0.5, score=0.1, train=0.4, rollouts_per_step=4),
    )
    assert (result["seconds"], result["ideal_seconds"]) == pytest.approx((1.25, 1.0))
    assert result["ratio"] == pytest.approx(1.25)
    assert result["wall_seconds"] == pytest.approx({"start": 10, "training": 2.25, "end": 7.75, "campaign": 20})
    assert result["cpu_seconds"] == {
        "controller": {"start": 0.5, "training": 0.25, "end": 0.25},
        "server": {"start": 1.0, "training": 0.5, "end": 0.5},
    }
    # A table to which nothing was added is left out.
    assert result["rows"] == {"events": {"start": 2, "training": 1, "end": 4, "training_per_hour": 1600}}


@pytest.mark.extended
@pytest.mark.campaign
def test_the_stages_of_a_real_campaign_sleep_and_every_figure_is_there(tmp_path: Path) -> None:
    figures = tmp_path / "controller.json"
    sleeps = [part for stage, seconds in _SLEEPS.items() for part in (f"--{stage}", str(seconds))]
    ended = subprocess.run(
        [sys.executable, "-m", "benchmarks.controller", "--steps", str(_STEPS), *sleeps, "--json", str(figures)],
        cwd=REPOSITORY,
        # Nothing of the person's own Prefect changes what is measured.
        env={name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert ended.returncode == 0, ended.stdout
    result = json.loads(figures.read_text())
    assert result["steps"] == _STEPS
    assert result["sleeps"] == _SLEEPS
    assert result["ideal_seconds"] == pytest.approx(0.2 * (_STEPS - 1))
    assert result["ratio"] == pytest.approx(result["seconds"] / result["ideal_seconds"])
    # That it was the sleepers who worked: a sleep is never shorter than asked for.
    for stage, seconds in _SLEEPS.items():
        assert result["busy_seconds"][stage] >= _STEPS * seconds, result["busy_seconds"]
    wall = result["wall_seconds"]
    assert all(wall[phase] > 0 for phase in PHASES), wall
    assert sum(wall[phase] for phase in PHASES) == pytest.approx(wall["campaign"])
    for process in ("controller", "server"):
        cpu = result["cpu_seconds"][process]
        assert sum(cpu[phase] for phase in PHASES) > 0, cpu
    rows = result["rows"]
    assert sum(rows["flow_run"][phase] for phase in PHASES) == 1, rows
    # The four stages of the pipeline, bootstrap, and evaluation before and after.
    assert sum(rows["task_run"][phase] for phase in PHASES) >= 7, rows
    assert "target ≤ 1.03" in ended.stdout
