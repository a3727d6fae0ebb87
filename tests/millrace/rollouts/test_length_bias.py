"""Length bias: mean length and reward of trained responses, relative to all taken ones."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.streams.scored_groups import scored_group

from millrace.rollouts.ledger import Amount
from millrace.rollouts.length_bias import STEPS, LengthBias
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from storage.streams.record import Record

members = st.lists(st.tuples(st.integers(1, 50), st.one_of(st.none(), st.floats(0, 1))), min_size=1, max_size=6)
steps = st.lists(st.tuples(members, st.lists(members, max_size=3)), min_size=1, max_size=STEPS + 10)


def group(of_members: list[tuple[int, float | None]]) -> ScoredGroup:
    return scored_group(0, [[3] * length for length, _ in of_members], [reward for _, reward in of_members])


@given(steps)
def test_ratios_are_of_the_means_over_the_last_steps(
    story: list[tuple[list[tuple[int, float | None]], list[list[tuple[int, float | None]]]]],
) -> None:
    story = [([(7, 0.5), *trained], dropped) for trained, dropped in story]
    bias = LengthBias()
    for trained, dropped in story:
        for of_members in dropped:
            bias.take(group(of_members))
        bias.take(group(trained), group(trained).trained)
        ratios = bias.step()
    window = story[-STEPS:]
    of_trained = [member for trained, _ in window for member in trained if member[1] is not None]
    taken = [member for trained, dropped in window for some in (trained, *dropped) for member in some]
    lengths = [sum(length for length, _ in some) / len(some) for some in (of_trained, taken)]
    assert (ratios.trained_length, ratios.taken_length) == pytest.approx(tuple(lengths))
    assert ratios.length_ratio == pytest.approx(lengths[0] / lengths[1])
    known_rewards = [reward for _, reward in taken if reward is not None]
    of_trained_rewards = [reward for _, reward in of_trained if reward is not None]
    expected = sum(of_trained_rewards) / len(of_trained_rewards) / (sum(known_rewards) / len(known_rewards))
    assert ratios.reward_ratio == pytest.approx(expected)


@pytest.mark.parametrize(
    ("rewards", "reward_ratio"), [((0.0, 1.0), {"reward_ratio": 1.0}), ((0.0, 0.0), {}), ((-1.0, -1.0), {})]
)
def test_a_fully_trained_group_has_no_bias(rewards: tuple[float, float], reward_ratio: dict[str, float]) -> None:
    """The ratio of rewards is omitted unless the mean reward is positive."""
    bias = LengthBias()
    bias.take(group([(3, rewards[0]), (9, rewards[1])]), [0, 1])
    assert bias.step().metrics() == {"length_ratio": 1.0, **reward_ratio}


def test_responses_of_a_damaged_part_count_with_their_lengths() -> None:
    record = Record(seq=3, kind="data", epoch=0, nonce="", writer="", prev="", rows=2, first_row_id=0, tokens=18)
    bias = LengthBias()
    bias.take(LostPart(generator=0, record=record, left=Amount(rollouts=2, tokens=18), num_groups=1, reason="damaged"))
    bias.take(group([(3, 1.0), (3, 0.0)]), [0, 1])
    ratios = bias.step()
    assert (ratios.trained_length, ratios.taken_length, ratios.reward_ratio) == (3.0, 6.0, 1.0)


def test_the_step_ratio_is_of_the_last_step_alone() -> None:
    bias = LengthBias()
    bias.take(group([(2, 1.0), (6, 0.0)]), [0])
    first = bias.step()
    assert (first.length_ratio, first.reward_ratio, first.step_length_ratio) == (0.5, 2.0, 0.5)
    bias.take(group([(3, 1.0), (3, 0.0)]), [0, 1])
    ratios = bias.step()
    assert ratios.step_length_ratio == 1.0
    assert ratios.length_ratio < 0.8
