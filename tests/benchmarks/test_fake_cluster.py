"""The planner's memory and traffic of trainers, against the trainer's own code on ranks that do not exist."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY

from benchmarks.fake_cluster import WITHIN


@pytest.mark.slow
def test_a_trainer_takes_the_memory_and_traffic_that_are_planned(tmp_path: Path) -> None:
    presets = {"qwen3-1.7b-1gpu": set(), "qwen3-30b-a3b-16gpu": {"gathered", "scattered"}}
    presets["llama-405b-1024gpu"] = {"gathered", "scattered", "reduced"}
    # A process of its own, because a process has one process group.
    command = [sys.executable, "-m", "benchmarks.fake_cluster", *presets, "--json", str(tmp_path / "rows.json")]
    subprocess.run(command, check=True, capture_output=True, cwd=REPOSITORY)
    for row in json.loads((tmp_path / "rows.json").read_text())["rows"]:
        assert row["memory_ratio"] == pytest.approx(1, abs=WITHIN)
        assert row["traffic_ratios"].keys() == presets[row["preset"]]
        assert row["traffic_ratios"] == pytest.approx(dict.fromkeys(row["traffic_ratios"], 1), abs=0.01)
