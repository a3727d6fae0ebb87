"""Figures of an evaluation: pass@k, majority votes, and intervals that are as wide as they should be."""

import itertools
import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.evaluation.measures import (
    Answered,
    Estimate,
    accuracy,
    answer_given,
    majority_right,
    mean_over_prompts,
    pass_at,
    sampled_measures,
    weighted_mean,
)


def judged(answer: str | None, reward: float | None) -> Answered:
    return Answered(response="", answer=answer, reward=reward)


def answers(rewards: Sequence[float]) -> list[Answered]:
    return [judged(str(reward), reward) for reward in rewards]


@given(n=st.integers(1, 7), data=st.data())
def test_pass_at_k_is_the_share_of_choices_of_k_with_a_right_answer(n: int, data: st.DataObject) -> None:
    right = data.draw(st.integers(0, n))
    k = data.draw(st.integers(1, n))
    rewards = [1.0] * right + [0.0] * (n - right)
    choices = list(itertools.combinations(rewards, k))
    assert pass_at(k, [answers(rewards)]).value == pytest.approx(sum(map(any, choices)) / len(choices))


def test_pass_at_k_is_the_mean_over_prompts() -> None:
    sampled = [answers([1, 0, 0, 0]), answers([0, 0, 0, 0]), answers([1, 1, 1, 1])]
    assert pass_at(1, sampled).value == pytest.approx((0.25 + 0 + 1) / 3)
    assert pass_at(2, sampled).value == pytest.approx((0.5 + 0 + 1) / 3)
    assert pass_at(4, sampled).value == pytest.approx(2 / 3)


def test_partial_rewards_and_failed_verifiers_are_not_right() -> None:
    assert pass_at(1, [[judged("a", 0.99), judged("b", None)]]).value == 0
    assert pass_at(1, [[judged("a", 1.0), judged("b", 1.5)]]).value == 1
    assert accuracy([judged("a", 1.0), judged("b", None)]).value == 0.5
    assert list(sampled_measures([answers([1.0] * 7)])["pass_at"]) == ["1", "2", "4"]


@pytest.mark.parametrize(
    ("responses", "right"),
    [
        ([("4", 1.0), ("5", 0.0), ("4", 1.0)], True),
        ([("5", 0.0), ("4", 1.0), ("5", 0.0)], False),
        ([("5", 0.0), ("4", 1.0)], False),
        ([("4", 1.0), ("5", 0.0)], True),
        ([(None, 0.0), (None, 0.0), ("4", 1.0)], True),
        ([(None, 0.0)], False),
        ([("4", None), ("4", 1.0)], True),
    ],
    ids=["most", "fewest", "tie, wrong first", "tie, right first", "no answer, no vote", "none", "one verdict failed"],
)
def test_the_majority_is_the_answer_given_most_often(
    responses: list[tuple[str | None, float | None]], right: bool
) -> None:
    assert majority_right([judged(answer, reward) for answer, reward in responses]) is right


@pytest.mark.parametrize(
    ("response", "pattern", "answer"),
    [
        ("it is #### 4 or #### 5 ", r"#### ([^#]*)", "5"),
        ("it is 4", r"#### (\d+)", None),
        ("end", r"end(\d+)?", None),
        (r"so $\boxed{\frac{1}{2}}$, I think", None, r"\frac{1}{2}"),
        (" 42\n", None, "42"),
        (" ", None, None),
        ("it is \\boxed{4}</think> 5 ", None, "5"),
        ("#### 4</think>#### 5,000", r"#### (\d+)", "5000"),
        ("<think>#### 4", r"#### (\d+)", None),
    ],
)
def test_the_answer_is_the_patterns_match_or_the_last_box_or_all(
    response: str, pattern: str | None, answer: str | None
) -> None:
    assert answer_given(response, pattern) == answer


@pytest.mark.parametrize(
    ("right", "n", "low", "high"),
    # Wilson's interval at 95 %, as Brown, Cai and DasGupta (2001) and every statistics package give it.
    [(8, 10, 0.4902, 0.9433), (0, 10, 0.0, 0.2775), (10, 10, 0.7225, 1.0), (50, 100, 0.4038, 0.5962)],
)
def test_right_or_wrong_answers_get_wilsons_interval(right: int, n: int, low: float, high: float) -> None:
    estimate = accuracy(answers([1.0] * right + [0.0] * (n - right)))
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((right / n, low, high), abs=1e-4)


@given(values=st.lists(st.floats(0, 1), min_size=1, max_size=20))
def test_an_interval_contains_its_value_and_stays_within_0_and_1(values: list[float]) -> None:
    estimate = mean_over_prompts(values)
    assert estimate.low is not None
    assert estimate.high is not None
    assert 0 <= estimate.low <= estimate.value + 1e-12
    assert estimate.value - 1e-12 <= estimate.high <= 1


def test_rewards_on_another_scale_get_standard_errors() -> None:
    estimate = accuracy(answers([-2.0, 0.0, 2.0, 4.0]))
    half = 1.959964 * math.sqrt(20 / 3) / 2
    assert (estimate.value, estimate.low, estimate.high) == pytest.approx((1.0, 1 - half, 1 + half))
    assert accuracy(answers([3.0])) == Estimate(value=3.0, low=None, high=None)


@pytest.mark.parametrize(("prompts", "samples"), [(40, 1), (40, 4), (100, 8)])
def test_at_least_nineteen_of_twenty_intervals_hold_the_true_value(prompts: int, samples: int) -> None:
    # Prompts differ in how hard they are, so answers to one of them are not independent of each other. With several
    # answers per prompt the interval is too wide.
    rng = random.Random(0)
    held = 0
    for _ in range(1000):
        hardness = [rng.betavariate(1, 2) for _ in range(prompts)]
        shares = [sum(rng.random() < p for _ in range(samples)) / samples for p in hardness]
        estimate = mean_over_prompts(shares)
        assert estimate.low is not None
        assert estimate.high is not None
        held += estimate.low <= 1 / 3 <= estimate.high
    assert held >= 930
    assert samples > 1 or held <= 975


def test_the_mean_of_one_estimate_is_that_estimate() -> None:
    estimate = mean_over_prompts([1.0, 0.0, 0.0, 1.0, 1.0])
    mean = weighted_mean([(3.0, estimate)])
    assert (mean.value, mean.low, mean.high) == pytest.approx((estimate.value, estimate.low, estimate.high))


def test_a_weighted_mean_of_an_estimate_without_interval_has_none() -> None:
    estimates = [(1.0, Estimate(value=3.0, low=None, high=None)), (3.0, mean_over_prompts([1.0, 0.0]))]
    assert weighted_mean(estimates) == Estimate(value=1.125, low=None, high=None)


@pytest.mark.parametrize(
    "sources", [[(1.0, 40, 0.3), (1.0, 40, 0.7)], [(5.0, 100, 0.02), (1.0, 20, 0.5), (2.0, 50, 0.9)]]
)
def test_at_least_nineteen_of_twenty_intervals_hold_the_true_weighted_mean(
    sources: list[tuple[float, int, float]],
) -> None:
    rng = random.Random(0)
    total = sum(weight for weight, _, _ in sources)
    true = sum(weight * right for weight, _, right in sources) / total
    held = 0
    for _ in range(1000):
        mean = weighted_mean(
            [
                (weight, mean_over_prompts([float(rng.random() < right) for _ in range(prompts)]))
                for weight, prompts, right in sources
            ]
        )
        assert mean.low is not None
        assert mean.high is not None
        held += mean.low <= true <= mean.high
    assert 930 <= held <= 975
