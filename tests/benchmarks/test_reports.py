"""The arithmetic of reports, and the refusal without a GPU; the figures themselves are taken by hand."""

import subprocess
import sys

import pytest
import torch
from support.campaigns.campaigns import REPOSITORY

from benchmarks.async_vs_sync import compare
from benchmarks.start import report


def test_a_pipeline_that_overlaps_perfectly_reaches_its_bound() -> None:
    stages = {"generate": 0.3, "score": 0.1, "train": 0.4, "sync": 0.0}
    result = compare(
        {"seconds_per_step": 0.8, "stage_seconds": stages}, {"seconds_per_step": 0.4, "stage_seconds": stages}
    )
    assert result["bound"] == pytest.approx(2.0)
    assert result["speedup"] == pytest.approx(2.0)
    assert result["speedup_over_bound"] == pytest.approx(1.0)


def test_the_report_holds_medians_over_the_campaigns() -> None:
    campaigns = [
        {
            "first_step_seconds": seconds,
            "cpu_seconds": {"controller": 2.0, "train-0": seconds / 2},
            "pss_bytes": {"controller": 100, "train-0": int(seconds)},
        }
        for seconds in (10.0, 30.0, 12.0)
    ]
    result = report(campaigns)
    assert result["first_step_seconds"] == {"median": 12.0, "each": [10.0, 30.0, 12.0]}
    assert result["cpu_seconds"]["median"] == 2.0 + 6.0
    assert result["pss_bytes"] == {"median": 112, "each": [110, 130, 112]}
    assert result["processes"]["train-0"] == {"cpu_seconds": 6.0, "pss_bytes": 12}


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a CUDA device")
@pytest.mark.parametrize("module", ["benchmarks.trainer", "benchmarks.weights"])
def test_without_a_gpu_it_says_so_in_one_line_and_ends_with_2(module: str) -> None:
    command = [sys.executable, "-m", module, "--device", "cuda"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert (ended.returncode, ended.stdout) == (2, "")
    assert ended.stderr == "--device cuda needs a CUDA device, but torch sees none\n"
