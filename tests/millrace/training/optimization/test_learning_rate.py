"""Learning rates in closed form."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from configs.training import ScheduleConfig
from millrace.training.optimization.learning_rate import ess_factor, share_of_rate


def shares(num_steps: int, **schedule: object) -> list[float]:
    found = ScheduleConfig.model_validate(schedule)
    return [share_of_rate(found, step) for step in range(1, num_steps + 1)]


def test_the_default_is_the_full_rate_always() -> None:
    assert shares(5) == [1.0] * 5


def test_a_warm_up_rises_evenly_to_the_full_rate() -> None:
    assert shares(5, warmup_steps=3) == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_a_linear_decay_falls_evenly_to_the_final_share_and_stays() -> None:
    linear = shares(8, decay="linear", warmup_steps=1, steps=5, final_share=0.2)
    assert linear == pytest.approx([0.5, 1.0, 0.8, 0.6, 0.4, 0.2, 0.2, 0.2])


def test_a_cosine_decay_is_half_way_down_at_half_time() -> None:
    cosine = shares(12, decay="cosine", warmup_steps=2, steps=10, final_share=0.5)
    assert cosine[:3] == pytest.approx([1 / 3, 2 / 3, 1.0])
    assert cosine[6] == pytest.approx(0.75)
    assert cosine[4] == pytest.approx(0.5 + 0.5 * (1 + math.cos(math.pi / 4)) / 2)
    assert cosine[10:] == [0.5, 0.5]


@given(
    decay=st.sampled_from(["constant", "linear", "cosine"]),
    warmup=st.integers(0, 20),
    after=st.integers(1, 30),
    final=st.floats(0, 1),
)
def test_a_rate_first_rises_then_falls_and_is_never_above_the_full_one(
    decay: str, warmup: int, after: int, final: float
) -> None:
    steps = None if decay == "constant" else warmup + after
    found = shares(60, decay=decay, warmup_steps=warmup, steps=steps, final_share=final)
    assert all(0 < share <= 1 for share in found[: warmup + 1])
    assert found[: warmup + 1] == sorted(found[: warmup + 1])
    assert found[warmup] == 1.0
    assert all(a >= b for a, b in zip(found[warmup:], found[warmup + 1 :], strict=False))
    assert found[-1] == pytest.approx(1.0 if decay == "constant" else final, abs=1e-12)


def test_ratios_of_1_leave_the_rate_as_it_is() -> None:
    assert ess_factor(np.zeros(7)) == 1.0


@given(st.lists(st.floats(-5, 5), min_size=1, max_size=20), st.floats(-1000, 1000))
def test_the_rate_is_multiplied_by_the_root_of_the_share_of_equal_ratios_that_weigh_as_much(
    log_ratios: list[float], shift: float
) -> None:
    ratio = np.exp(log_ratios)
    expected = math.sqrt(ratio.sum() ** 2 / (len(ratio) * (ratio**2).sum()))
    assert ess_factor(np.array(log_ratios) + shift) == pytest.approx(expected, rel=1e-9)
