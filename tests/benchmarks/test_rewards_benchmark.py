"""The benchmark of rewards counts the good responses alone, and spreads the hostile ones among them."""

import pytest

from benchmarks.rewards import good_rate, good_tasks, rewards
from millrace.rewards.isolation.pool import Pool
from millrace.rewards.isolation.sandbox import Limits

LIMITS = Limits(timeout_seconds=0.5, memory_mb=256)


@pytest.mark.slow
def test_hostile_responses_take_no_part_in_the_rate() -> None:
    reward = rewards()["exact_match"]
    with Pool([reward], LIMITS) as pool:
        assert good_rate(pool, good_tasks("exact_match", 40), ["a" * 40 + "!"] * 2) > 0
