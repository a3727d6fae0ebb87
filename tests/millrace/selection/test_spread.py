"""Groups whose rewards are all equal: found, dropped, counted, and reported when nothing else comes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.streams.scored_groups import scored_group

from configs.training import SelectionConfig
from millrace.rollouts.scored_group import ScoredGroup
from millrace.selection.spread import ZERO_ADVANTAGE, SpreadFilter, has_spread
from millrace.training.samples import ADVANTAGES

DROP = SelectionConfig(drop_zero_advantage=True)
EQUAL, SPREAD = [1.0, None, 1.0], [1.0, None, 0.0]
rewards = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, None]), min_size=2, max_size=6)


def group(of_members: list[float | None], lengths: list[int] | None = None) -> ScoredGroup:
    return scored_group(0, [[1] * length for length in lengths or [1] * len(of_members)], of_members)


@given(rewards.filter(lambda of_members: any(reward is not None for reward in of_members)))
@pytest.mark.parametrize("advantage", sorted(set(ADVANTAGES) - {"reinforce_plus_plus"}))
def test_without_spread_every_advantage_is_0_and_only_then(advantage: str, of_members: list[float | None]) -> None:
    known = [reward for reward in of_members if reward is not None]
    # The batch has another group, whose rewards differ.
    found = ADVANTAGES[advantage]([known, [0.0, 1.0]])[0]
    assert any(found) == has_spread(group(of_members), DROP)


def test_equal_rewards_that_are_shaped_differently_have_spread() -> None:
    config = SelectionConfig(overlong_buffer=8)
    assert has_spread(group([1.0, 1.0], [16, 2]), config)
    assert not has_spread(group([1.0, 1.0], [5, 2]), config), "both are short enough"


def test_groups_without_spread_are_dropped_only_if_the_config_asks_for_it() -> None:
    for config, reason in ((DROP, ZERO_ADVANTAGE), (SelectionConfig(), None)):
        chosen = SpreadFilter(config, 2)
        assert [chosen.drop_reason(group(of_members)) for of_members in (EQUAL, SPREAD)] == [reason, None]
        assert (chosen.share, chosen.step()) == (0.5, 0.5)


def test_the_share_of_a_step_is_that_of_the_groups_taken_for_it() -> None:
    chosen = SpreadFilter(DROP, 1)
    assert chosen.share is None
    for of_step, share in (([EQUAL, EQUAL, EQUAL, SPREAD], 0.75), ([SPREAD], 0.0)):
        for of_members in of_step:
            chosen.drop_reason(group(of_members))
        assert chosen.step() == share
    assert chosen.share == pytest.approx(3 / 5)


def test_a_run_is_held_up_when_nine_in_ten_of_ten_steps_worth_of_groups_have_no_spread() -> None:
    chosen = SpreadFilter(DROP, 2)
    for number in range(19):
        chosen.drop_reason(group(SPREAD if number < 3 else EQUAL))
        assert chosen.starving() is None, "fewer than ten steps' worth"
    chosen.drop_reason(group(EQUAL))
    assert chosen.starving() is None, "17 of 20"
    chosen.drop_reason(group(EQUAL))
    sentence = chosen.starving()
    assert sentence is not None
    assert sentence.startswith("18 of the last 20 groups (90%) were dropped because their rewards are all equal")
    chosen.drop_reason(group(EQUAL))
    assert chosen.starving() is None, "at most once a minute"
