"""Rewards shaped by length against DAPO's formula, advantages weighed by source, and groups whose rewards are equal."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.streams.scored_groups import scored_group

from configs.training import SelectionConfig, TrainingConfig
from millrace.prompts.packages import PromptSource
from millrace.rollouts.scored_group import ScoredGroup
from millrace.rollouts.shaping import ZERO_ADVANTAGE, SpreadFilter, shaped_rewards, source_factor
from millrace.training.samples import ADVANTAGES, samples_of

DROP = SelectionConfig(drop_zero_advantage=True)
FACTORS = {"chain_sum": 0.5, "leg_counting": 0.0}
EQUAL, SPREAD = [1.0, None, 1.0], [1.0, None, 0.0]
rewards = st.lists(st.sampled_from([0.0, 0.1, 0.3, 1.0, None]), min_size=2, max_size=6)


def group(of_members: list[float | None], lengths: list[int] | None = None, max_new_tokens: int = 16) -> ScoredGroup:
    versions = [[1] * length for length in lengths or [1] * len(of_members)]
    return scored_group(0, versions, of_members, max_new_tokens=max_new_tokens)


def source(task: str) -> str:
    return PromptSource(package="reasoning_gym", name=task, arguments={"size": 5, "seed": 0}).text


@given(rewards.filter(lambda of_members: any(reward is not None for reward in of_members)))
@pytest.mark.parametrize("advantage", sorted(set(ADVANTAGES) - {"reinforce_plus_plus"}))
def test_all_advantages_are_0_exactly_without_spread(advantage: str, of_members: list[float | None]) -> None:
    rewards = [reward for reward in of_members if reward is not None]
    # The batch has another group, whose rewards differ.
    advantages = ADVANTAGES[advantage]([rewards, [0.0, 1.0]])[0]
    assert any(advantages) == (SpreadFilter(DROP, 1).drop_reason(group(of_members)) is None)


@pytest.mark.parametrize(("lengths", "spread"), [([16, 2], True), ([5, 2], False)])
def test_equal_rewards_that_are_shaped_differently_have_spread(lengths: list[int], spread: bool) -> None:
    config = SelectionConfig(overlong_buffer=8, drop_zero_advantage=True)
    assert (SpreadFilter(config, 1).drop_reason(group([1.0, 1.0], lengths)) is None) == spread


def test_groups_without_spread_are_dropped_only_if_configured() -> None:
    for config, reason in ((DROP, ZERO_ADVANTAGE), (SelectionConfig(), None)):
        chosen = SpreadFilter(config, 2)
        assert [chosen.drop_reason(group(of_members)) for of_members in (EQUAL, SPREAD)] == [reason, None]
        assert (chosen.share, chosen.step()) == (0.5, {"zero_advantage_share": 0.5})


def test_a_response_without_others_has_nothing_to_differ_from() -> None:
    spread = SpreadFilter(DROP, 1)
    assert spread.drop_reason(group([1.0])) is None
    assert spread.step()["zero_advantage_share"] == 0.0
    assert [group(rewards).drop_reason for rewards in ([1.0], [None], [1.0, None])] == [None, "error", "error"]


def test_a_steps_share_is_of_the_groups_taken_for_it() -> None:
    chosen = SpreadFilter(DROP, 1)
    assert chosen.share is None
    for of_step, share in (([EQUAL, EQUAL, EQUAL, SPREAD], 0.75), ([SPREAD], 0.0)):
        for of_members in of_step:
            chosen.drop_reason(group(of_members))
        assert chosen.step() == {"zero_advantage_share": share}
    assert chosen.share == pytest.approx(3 / 5)


def test_ten_steps_with_nine_in_ten_groups_without_spread_are_reported() -> None:
    chosen = SpreadFilter(DROP, 2)
    for number in range(19):
        chosen.drop_reason(group(SPREAD if number < 3 else EQUAL))
        assert chosen.starving() is None, "fewer than ten steps' worth"
    chosen.drop_reason(group(EQUAL))
    assert chosen.starving() is None, "17 of 20"
    chosen.drop_reason(group(EQUAL))
    assert "18 of the last 20 groups" in (chosen.starving() or "")
    chosen.drop_reason(group(EQUAL))
    assert chosen.starving() is None, "at most once a minute"


@given(st.data(), st.integers(1, 40), st.floats(-5, 5))
def test_the_length_penalty_is_that_of_the_paper(data: st.DataObject, limit: int, reward: float) -> None:
    buffer = data.draw(st.integers(1, limit))
    length = data.draw(st.integers(1, limit))
    # Equation 13, whose largest punishment is 1.
    of_paper = 0.0 if length <= limit - buffer else ((limit - buffer) - length) / buffer
    shaped = shaped_rewards(group([reward], [length], limit), SelectionConfig(overlong_buffer=buffer))
    assert shaped == pytest.approx([reward + of_paper])


@given(st.lists(st.tuples(st.floats(-5, 5), st.integers(1, 16)), min_size=1, max_size=5))
def test_without_a_buffer_rewards_are_unchanged(members: list[tuple[float, int]]) -> None:
    stored = [reward for reward, _ in members]
    assert shaped_rewards(group([*stored], [length for _, length in members]), SelectionConfig()) == stored


def test_advantages_are_of_shaped_rewards_and_stored_rewards_stay() -> None:
    stored, selection = group([1.0, 1.0, None], [12, 16, 16]), SelectionConfig(overlong_buffer=4)
    assert shaped_rewards(stored, selection) == [1.0, 0.0]
    assert [
        sample.advantage for sample in samples_of([stored], TrainingConfig(max_steps=1, selection=selection), 1)
    ] == [0.5, -0.5]
    assert stored.rewards == [1.0, 1.0, None]


@pytest.mark.parametrize(
    ("of_prompt", "factor"),
    [(source("chain_sum"), 0.5), (source("leg_counting"), 0.0), (source("maze"), 1.0), ("train.jsonl", 1.0)],
)
def test_the_factor_is_that_of_the_prompts_task(of_prompt: str, factor: float) -> None:
    assert source_factor(scored_group(0, [[1], [1]], [1.0, 0.0], task=of_prompt), FACTORS) == factor


def test_the_advantages_of_a_task_are_multiplied_by_its_factor() -> None:
    groups = [
        scored_group(n, [[1], [1]], [1.0, 0.0], task=source(task)) for n, task in enumerate(("chain_sum", "maze"))
    ]
    samples = samples_of(groups, TrainingConfig(max_steps=1, selection=SelectionConfig(source_factors=FACTORS)), 1)
    assert [sample.advantage for sample in samples] == [0.25, -0.25, 0.5, -0.5]


def test_a_group_with_a_teacher_is_trained_without_spread() -> None:
    taught = scored_group(0, [[1], [1]], [1.0, 1.0], teacher_logprobs=[[-1.0], [-2.0]])
    assert SpreadFilter(DROP, 1).drop_reason(taught) is None
