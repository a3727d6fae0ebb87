"""Rank 0 leads, rank 1 follows: together they are one trainer."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tasks.start import launch

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[4]
PATH = f"{ROOT}:{ROOT}/tests:{ROOT}/tests/support/campaigns/base_install"
TOLERANCE = 1e-5
"""Of weights in float32 of about 1, after one or two steps: over two ranks a sum has another order."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Results of two processes, see `support.training.leader_ranks`; both have to end without an error."""
    folder = tmp_path_factory.mktemp("leader")
    subprocess.run(
        launch(2, ["-m", "support.training.leader_ranks", str(folder / "run"), str(folder / "report.json")]),
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": PATH},
        check=True,
    )
    contents: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return contents


def test_a_step_and_its_report_are_those_of_one_rank(report: dict[str, Any]) -> None:
    assert report["log π"] <= TOLERANCE
    assert report["weights"] <= TOLERANCE


def test_the_likeliest_next_tokens_are_the_same(report: dict[str, Any]) -> None:
    assert report["next tokens"]


def test_each_checkpoint_is_committed_with_the_state_it_was_begun_with(report: dict[str, Any]) -> None:
    assert report["states"] == [{"n": 1}, {"n": 2}]


def test_damage_that_only_the_follower_reads_is_named_by_rank_0(report: dict[str, Any]) -> None:
    assert report["found damaged"] == report["damaged"]


def test_an_older_checkpoint_is_restored_and_trained_on_after_a_sleep(report: dict[str, Any]) -> None:
    assert report["version"] == 1
    assert report["restored weights"] <= TOLERANCE
    assert report["next step"] <= TOLERANCE
