"""Scored groups become samples: the verified members, with staleness, and with advantages as the formulas have them."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.streams.scored_groups import scored_group

from configs.training import AdvantageName, TrainingConfig
from millrace.errors import InputError
from millrace.rollouts.masking import mask_too_old
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.samples import (
    ADVANTAGES,
    Estimator,
    maxrl,
    reinforce_plus_plus,
    samples_of,
)


def group(number: int, rewards: Sequence[float | None], versions: Sequence[int]) -> ScoredGroup:
    """A group whose i-th response is i + 1 tokens of its number, all of one version."""
    members = [[version] * (i + 1) for i, version in enumerate(versions)]
    return replace(
        scored_group(number, members, rewards),
        prompt_tokens=[np.array([1, number], dtype=np.int32)] * len(versions),
        response_tokens=[np.full(len(member), number, dtype=np.int32) for member in members],
        temperature=0.5 + number,
    )


def training(advantage: str) -> TrainingConfig:
    return TrainingConfig(max_steps=1, advantage=advantage)


GROUPS = [group(0, [1.0, None, 0.0], [4, 5, 3]), group(1, [2.0, 2.0, 5.0], [2, 2, 1])]


def test_each_verified_member_is_a_sample_in_the_order_of_the_groups() -> None:
    samples = samples_of(GROUPS, training("group_mean"), 5)
    assert [sample.response_tokens.tolist() for sample in samples] == [[0], [0, 0, 0], [1], [1, 1], [1, 1, 1]]
    assert [sample.temperature for sample in samples] == [0.5, 0.5, 1.5, 1.5, 1.5]
    assert [sample.advantage for sample in samples] == [0.5, -0.5, -1.0, -1.0, 2.0]


def test_an_advantage_may_be_of_the_whole_batch() -> None:
    advantages = [sample.advantage for sample in samples_of(GROUPS, training("reinforce_plus_plus"), 5)]
    rewards = np.array([1.0, 0.0, 2.0, 2.0, 5.0])
    assert advantages == pytest.approx((rewards - rewards.mean()) / rewards.std(ddof=1), rel=1e-5)


@pytest.mark.parametrize(("versions", "staleness"), [(5, [1, 2, 3, 3, 4]), ([5, 2], [1, 2, 0, 0, 1])])
def test_each_response_lags_behind_the_trainer_of_its_group(versions: int | list[int], staleness: list[int]) -> None:
    assert [sample.staleness for sample in samples_of(GROUPS, training("group_mean"), versions)] == staleness


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_reward_makes_the_baseline_and_what_is_left_of_each_member_is_a_sample(advantage: str) -> None:
    rewards = [1.0, 0.5, 0.25, 0.0]
    whole = scored_group(0, [[6, 6], [1, 1], [1, 1, 5], [6]], rewards)
    samples = samples_of([mask_too_old(whole, 7, 2), GROUPS[1]], training(advantage), 7)
    expected = ADVANTAGES[advantage]([rewards, [2.0, 2.0, 5.0]])
    assert [sample.advantage for sample in samples] == [expected[0][i] for i in (0, 2, 3)] + expected[1]
    assert [sample.loss_mask.tolist() for sample in samples[:3]] == [[1, 1], [0, 0, 1], [1]]
    assert [sample.staleness for sample in samples[:3]] == [1, 2, 1]


@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_the_advantages_of_a_source_do_not_depend_on_the_rewards_of_others(advantage: str) -> None:
    of_math, of_code = [[1.0, 0.0], [0.0, 0.5, 1.0]], [[90.0, 10.0], [40.0, 70.0]]
    mixed = zip(("math", "code", "code", "math"), (of_math[0], *of_code, of_math[1]), strict=True)
    groups = [
        scored_group(number, [[0]] * len(rewards), rewards, source=source)
        for number, (source, rewards) in enumerate(mixed)
    ]
    samples = samples_of(groups, training(advantage), 0)
    for source, rewards in (("math", of_math), ("code", of_code)):
        expected = [value for values in ADVANTAGES[advantage](rewards) for value in values]
        assert [sample.advantage for sample in samples if sample.source == source] == expected


def test_a_source_may_have_an_estimator_of_its_own() -> None:
    groups = [scored_group(0, [[0]] * 3, [1.0, 1.0, 0.0]), scored_group(1, [[0]] * 3, [1.0, 1.0, 0.0], source="chat")]
    samples = samples_of(groups, training("group_mean"), 0, {"chat": training("leave_one_out")})
    assert [sample.advantage for sample in samples] == pytest.approx([1 / 3, 1 / 3, -2 / 3, 0.5, 0.5, -1.0])


def test_no_groups_are_no_samples() -> None:
    assert samples_of([], training("group_mean"), 0) == []


each_estimator = pytest.mark.parametrize("estimator", ADVANTAGES.values(), ids=ADVANTAGES.keys())
batches = st.lists(st.lists(st.floats(0, 100), min_size=1, max_size=8), min_size=1, max_size=6)


def groups_of(function: Callable[[np.ndarray], np.ndarray]) -> Callable[[list[np.ndarray]], list[np.ndarray]]:
    """A formula for each group separately."""
    return lambda groups: [function(group) for group in groups]


def whole_batch(groups: list[np.ndarray]) -> list[np.ndarray]:
    rewards = np.concatenate(groups)
    return [(group - rewards.mean()) / (rewards.std(ddof=1) + 1e-6) for group in groups]


def batch_deviation(groups: list[np.ndarray]) -> list[np.ndarray]:
    centred = [group - group.mean() for group in groups]
    return [group / (np.concatenate(centred).std(ddof=1) + 1e-6) for group in centred]


FORMULAS: dict[str, Callable[[list[np.ndarray]], list[np.ndarray]]] = {
    "group_mean": groups_of(lambda r: r - r.mean()),
    "leave_one_out": groups_of(lambda r: np.array([r[i] - np.delete(r, i).mean() for i in range(len(r))])),
    "grpo": groups_of(lambda r: (r - r.mean()) / (r.std(ddof=1) + 1e-6)),
    "reinforce_plus_plus": whole_batch,
    "reinforce_plus_plus_baseline": batch_deviation,
    "maxrl": groups_of(lambda r: (r - r.mean()) / r.mean()),
}


def test_every_name_a_config_may_hold_is_an_estimators_and_has_a_formula_here() -> None:
    assert list(get_args(AdvantageName)) == list(ADVANTAGES) == list(FORMULAS)


@pytest.mark.parametrize("seed", range(10))
@pytest.mark.parametrize("name", ADVANTAGES)
def test_the_advantages_of_random_batches_are_those_of_the_formula(name: str, seed: int) -> None:
    random = np.random.default_rng(seed)
    groups = [random.random(size) for size in random.integers(2, 9, size=5)]
    advantages = ADVANTAGES[name]([group.tolist() for group in groups])
    for group, expected in zip(advantages, FORMULAS[name](groups), strict=True):
        assert group == pytest.approx(expected.tolist(), rel=1e-12, abs=1e-12)


def test_only_the_batchs_baseline_tells_a_good_group_from_a_bad_one() -> None:
    groups = [[1.0, 1.0], [0.0, 0.0]]
    assert reinforce_plus_plus(groups) == [pytest.approx([0.866] * 2, rel=1e-3), pytest.approx([-0.866] * 2, rel=1e-3)]
    for name in set(ADVANTAGES) - {"reinforce_plus_plus"}:
        assert ADVANTAGES[name](groups) == [[0, 0], [0, 0]], name


@each_estimator
@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1 / 3])
def test_a_batch_that_agrees_teaches_exactly_nothing(estimator: Estimator, reward: float) -> None:
    assert estimator([[reward] * 3, [reward] * 7]) == [[0.0] * 3, [0.0] * 7]


@each_estimator
def test_a_group_of_one_has_an_advantage_of_0(estimator: Estimator) -> None:
    assert estimator([[0.7]]) == [[0.0]]
    if estimator is not reinforce_plus_plus:
        assert estimator([[0.7], [0.0, 1.0]])[0] == [0.0]


@each_estimator
def test_a_batch_may_be_empty_and_so_may_a_group(estimator: Estimator) -> None:
    assert estimator([]) == []
    assert estimator([[], [1.0, 0.0]])[0] == []


@each_estimator
@given(groups=batches)
def test_advantages_are_finite_one_a_reward_and_in_the_order_of_the_rewards(
    estimator: Estimator, groups: list[list[float]]
) -> None:
    batch = estimator(groups)
    assert [len(group) for group in batch] == [len(group) for group in groups]
    assert all(math.isfinite(advantage) for group in batch for advantage in group)
    for rewards, advantages in zip(groups, batch, strict=True):
        ranked = [advantage for _, advantage in sorted(zip(rewards, advantages, strict=True))]
        assert ranked == sorted(ranked)


@each_estimator
@pytest.mark.parametrize("reward", [math.nan, math.inf, -math.inf])
def test_a_reward_that_is_not_finite_is_refused_with_its_group(estimator: Estimator, reward: float) -> None:
    with pytest.raises(InputError) as refused:
        estimator([[0.0, 1.0], [reward, 1.0]])
    assert "group 1 " in refused.value.read
    assert refused.value.expected == "a finite number"


def test_maxrl_refuses_negative_rewards() -> None:
    with pytest.raises(InputError) as refused:
        maxrl([[1.0, -0.5]])
    assert "-0.5" in refused.value.read
    assert refused.value.expected == "rewards of at least 0"


@pytest.mark.parametrize(("teacher", "factor"), [("expert", 0.25), (None, 1.0)])
def test_where_there_is_a_teacher_rewards_have_a_factor(teacher: str | None, factor: float) -> None:
    distilled = TrainingConfig.model_validate(
        {"max_steps": 1, "distillation": {"teacher": teacher, "reward_coefficient": 0.25}}
    )
    taught = scored_group(0, [[0], [0, 0], [0]], [1.0, 0.0, 0.0], teacher_logprobs=[[-1.0], None, [-2.0]])
    samples = samples_of([taught], distilled, 0)
    assert [sample.advantage for sample in samples] == pytest.approx([factor * 2 / 3, -factor / 3])
    assert [sample.teacher_logprobs.tolist() for sample in samples] == [[-1.0], [-2.0]]


@pytest.mark.parametrize(("top_k", "expected"), [(None, []), (1, [7, 9]), (2, [7, 8, 9, 1])])
def test_samples_have_the_first_of_the_likeliest_tokens_that_are_stored(top_k: int | None, expected: list[int]) -> None:
    values = {"max_steps": 1, "distillation": {"teacher": "expert", "top_k": top_k}}
    group = scored_group(0, [[0, 0], [0, 0]], [1.0, 0.0], teacher_logprobs=[[-1.0, -1.0]] * 2)
    group.teacher_top_tokens[:] = [np.array([7, 8, 9, 1], dtype=np.int32)] * 2
    group.teacher_top_logprobs[:] = [np.array([-1, -2, -3, -4], dtype=np.float32)] * 2
    for sample in samples_of([group], TrainingConfig.model_validate(values), 0):
        assert sample.teacher_top_tokens.tolist() == expected
        assert len(sample.teacher_top_logprobs) == len(expected)


def test_a_response_without_its_teachers_log_probabilities_is_dropped_as_an_error() -> None:
    group = scored_group(0, [[0], [0]], [1.0, 0.0], teacher_logprobs=[None, [-1.0]])
    assert ([group.drop_reason_of(i) for i in range(2)], group.drop_reason) == (["error", None], None)
    assert scored_group(0, [[0], [0]], [1.0, 0.0], teacher_logprobs=[None, None]).drop_reason == "error"
