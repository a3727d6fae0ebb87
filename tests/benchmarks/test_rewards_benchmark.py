"""The benchmark of rewards measures the rate of good responses, and when hostile ones end."""

import pytest

from benchmarks.rewards import measure, rewards
from millrace.rewards.isolation.sandbox import Limits


@pytest.mark.slow
def test_a_hostile_response_ends_near_its_deadline() -> None:
    limits = Limits(timeout_seconds=0.5, memory_mb=256)
    figures = measure("exact_match", rewards()["exact_match"], limits, 60)
    assert figures["responses_per_second"] > 0
    assert figures["deadlines_to_verdict"] >= 1
