"""Rewards shaped by length, against DAPO's formula."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.streams.scored_groups import scored_group

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup
from millrace.selection.overlong import shaped_rewards
from millrace.training.samples import samples_of


def group(rewards: list[float | None], lengths: list[int], max_new_tokens: int = 16) -> ScoredGroup:
    return scored_group(0, [[1] * length for length in lengths], rewards, max_new_tokens=max_new_tokens)


def test_the_reward_falls_linearly_over_the_buffer() -> None:
    shaped = shaped_rewards(group([1.0] * 6, [1, 12, 13, 14, 15, 16]), SelectionConfig(overlong_buffer=4))
    assert shaped == [1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_reward_that_failed_has_no_shape() -> None:
    assert shaped_rewards(group([None, 1.0], [16, 16]), SelectionConfig(overlong_buffer=8)) == [0.0]


@given(st.data(), st.integers(1, 40), st.floats(-5, 5))
def test_the_punishment_is_that_of_the_paper(data: st.DataObject, limit: int, reward: float) -> None:
    buffer = data.draw(st.integers(1, limit))
    length = data.draw(st.integers(1, limit))
    # Equation 13, whose largest punishment is 1.
    of_paper = 0.0 if length <= limit - buffer else ((limit - buffer) - length) / buffer
    found = shaped_rewards(group([reward], [length], limit), SelectionConfig(overlong_buffer=buffer))
    assert found == pytest.approx([reward + of_paper])


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 16)), min_size=1, max_size=5))
def test_without_a_buffer_rewards_are_exactly_those_stored(members: list[tuple[float, int]]) -> None:
    stored = [reward for reward, _ in members]
    assert shaped_rewards(group([*stored], [length for _, length in members]), SelectionConfig()) == stored


def test_advantages_are_made_of_shaped_rewards_and_the_stored_ones_stay() -> None:
    stored = group([1.0, 1.0], [12, 16])
    selection = SelectionConfig(overlong_buffer=4)
    assert [sample.advantage for sample in samples_of([stored], "group_mean", 1, selection)] == [0.5, -0.5]
    assert stored.rewards == [1.0, 1.0]
