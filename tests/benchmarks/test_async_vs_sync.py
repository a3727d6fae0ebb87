"""The arithmetic of the comparison; the campaigns themselves are run by hand."""

import pytest

from benchmarks.async_vs_sync import compare


def test_a_pipeline_that_overlaps_perfectly_reaches_its_bound() -> None:
    stages = {"generate": 0.3, "score": 0.1, "train": 0.4, "sync": 0.0}
    result = compare(
        {"seconds_per_step": 0.8, "stage_seconds": stages}, {"seconds_per_step": 0.4, "stage_seconds": stages}
    )
    assert result["bound"] == pytest.approx(2.0)
    assert result["speedup"] == pytest.approx(2.0)
    assert result["speedup_over_bound"] == pytest.approx(1.0)
