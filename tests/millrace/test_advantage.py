"""Advantages: what is left of a reward once the group's mean is taken away."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.advantage import group_mean_advantages

rewards = st.lists(st.floats(-100, 100), min_size=1, max_size=16)


def test_a_response_is_worth_how_much_better_it_did_than_the_groups_mean() -> None:
    assert group_mean_advantages([1.0, 0.0, 0.0, 1.0]) == [0.5, -0.5, -0.5, 0.5]
    assert group_mean_advantages([1.0, 0.0, 0.0, 0.0]) == [0.75, -0.25, -0.25, -0.25]


def test_a_group_that_agrees_teaches_nothing() -> None:
    assert group_mean_advantages([1.0] * 8) == [0.0] * 8


def test_a_response_alone_has_nobody_to_be_better_than() -> None:
    assert group_mean_advantages([0.7]) == [0.0]


@given(rewards)
def test_the_advantages_of_a_group_add_up_to_nothing_and_keep_its_differences(values: list[float]) -> None:
    advantages = group_mean_advantages(values)
    assert sum(advantages) == pytest.approx(0.0, abs=1e-9)
    differences = [advantage - advantages[0] for advantage in advantages]
    assert differences == pytest.approx([value - values[0] for value in values], abs=1e-9)


@given(rewards, st.floats(-100, 100))
def test_a_bonus_for_everybody_changes_nothing(values: list[float], bonus: float) -> None:
    raised = group_mean_advantages([value + bonus for value in values])
    assert raised == pytest.approx(group_mean_advantages(values), abs=1e-9)
