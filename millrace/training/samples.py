"""Samples out of scored groups: the members that are trained, each with its advantage.

The advantage says how much better a response did than others, from the rewards of the batch's groups of one source,
including those of members whose tokens are all too old to train on:

    r reward; r̄, s mean and standard deviation in its group of n; b̄, t those over its source's part of the batch

    group_mean                    r − r̄                    LlamaRL, arXiv 2505.24034; Dr. GRPO, arXiv 2503.20783
    leave_one_out                 (r − r̄) · n / (n − 1)    RLOO, arXiv 2402.14740
    grpo                          (r − r̄) / (s + 1e-6)     arXiv 2402.03300, §4.1.2
    reinforce_plus_plus           (r − b̄) / (t + 1e-6)     arXiv 2501.03262
    reinforce_plus_plus_baseline  (r − r̄) / (t' + 1e-6)    arXiv 2501.03262; t' of all r − r̄ of that part
    maxrl                         (r − r̄) / r̄              MaxRL, arXiv 2602.02710

Standard deviations divide by n − 1, as in widely used code (TRL, verl); the papers don't say. Rewards that are all
equal teach nothing: the advantage is exactly 0. The same holds for a group of one, except for `reinforce_plus_plus`.
Rewards of different sources are never compared, because their scales differ (task advantage normalization of AgentRL,
arXiv 2510.04206).

The rewards may be shaped by length, and the advantages weighed by source (`millrace.rollouts.shaping`). Each estimator
takes the rewards per group and returns one advantage per reward. It raises InputError for a reward that is not finite.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from math import hypot, isfinite, sqrt
from types import MappingProxyType
from typing import Any

import numpy as np
import numpy.typing as npt

from configs.sources import naming_source
from configs.training import TrainingConfig
from millrace.errors import InputError
from millrace.rewards.function import imported_function
from millrace.rollouts.scored_group import ScoredGroup
from millrace.rollouts.shaping import shaped_rewards, source_factor
from millrace.rollouts.staleness import staleness
from millrace.training.batch import Sample

Rewards = Sequence[Sequence[float]]
"""[groups] of [members]."""
Estimator = Callable[[Rewards], list[list[float]]]

_EPSILON = 1e-6
"""Keeps rewards that differ by rounding alone from becoming advantages of ±1."""


def samples_of(
    groups: Sequence[ScoredGroup],
    training: TrainingConfig,
    policy_versions: int | Sequence[int],
    trainings: Mapping[str, TrainingConfig] = MappingProxyType({}),
) -> list[Sample]:
    """One sample per trained member of a batch's `groups`, in their order.

    `policy_versions` is the trainer's before the step: one for all groups, or one per group. `training` is the run's,
    and `trainings` are those of sources by name. Raises the errors of the estimators of advantages.
    """
    selection = training.selection
    versions = [policy_versions] * len(groups) if isinstance(policy_versions, int) else policy_versions
    rewards = [shaped_rewards(group, selection) for group in groups]
    sources = [group.source for group in groups]
    names = {source: trainings.get(source, training).advantage for source in dict.fromkeys(sources)}
    advantages = _advantages(names, rewards, sources)
    samples = []
    for number, (group, version, values) in enumerate(zip(groups, versions, advantages, strict=True)):
        factor, oldest = source_factor(group, selection.source_factors), group.oldest_versions
        distillation, top_k = trainings.get(group.source, training).distillation, 0
        if distillation.teacher is not None:
            factor, top_k = factor * distillation.reward_coefficient, distillation.top_k or 0
        teacher_logprobs = [np.zeros(0, np.float32) if values is None else values for values in group.teacher_logprobs]
        is_demonstration = group.is_demonstration
        advantage_of = {i: value * factor for i, value in zip(group.verified, values, strict=True)}
        samples += [
            Sample(
                prompt_tokens=group.prompt_tokens[i],
                response_tokens=group.response_tokens[i],
                rollout_logprobs=group.rollout_logprobs[i],
                loss_mask=group.loss_mask[i],
                temperature=group.temperature,
                advantage=advantage_of[i],
                staleness=staleness(version, int(oldest[i])),
                max_new_tokens=group.max_new_tokens,
                group=number,
                source=group.source,
                is_demonstration=is_demonstration,
                kept_tokens=group.kept_tokens[i],
                kept_counts=group.kept_counts[i],
                teacher_logprobs=teacher_logprobs[i],
                teacher_top_tokens=_likeliest(group.teacher_top_tokens[i], group.response_tokens[i], top_k),
                teacher_top_logprobs=_likeliest(group.teacher_top_logprobs[i], group.response_tokens[i], top_k),
                routed_experts=group.routed_experts[i],
            )
            for i in group.trained
        ]
    return samples


def _likeliest(values: npt.NDArray[Any], response_tokens: npt.NDArray[np.int32], top_k: int) -> npt.NDArray[Any]:
    """[R, at most `top_k`] flat: the first of the values of each response token."""
    return values.reshape(len(response_tokens), -1)[:, :top_k].ravel() if top_k and len(values) else values[:0]


def _advantages(names: Mapping[str, str], rewards: Rewards, sources: Sequence[str]) -> list[list[float]]:
    """[groups] of [members] advantages; those of a source follow from its own rewards. Errors name the source.

    `names` of estimators, as in `make_estimator`, are by source.
    """
    advantages: list[list[float]] = [[]] * len(sources)
    for source, name in names.items():
        numbers = [number for number, other in enumerate(sources) if other == source]
        with naming_source(source):
            estimates = make_estimator(name)([rewards[number] for number in numbers])
        for number, values in zip(numbers, estimates, strict=True):
            advantages[number] = values
    return advantages


def group_mean(groups: Rewards) -> list[list[float]]:
    """Reward minus the mean of its group. With the aggregation `constant` this is Dr. GRPO."""
    _check_finite(groups)
    return [_centred(rewards) for rewards in groups]


def leave_one_out(groups: Rewards) -> list[list[float]]:
    """Reward minus the mean of its siblings' rewards."""
    return [
        [advantage * len(group) / (len(group) - 1) if len(group) > 1 else 0.0 for advantage in group]
        for group in group_mean(groups)
    ]


def grpo(groups: Rewards) -> list[list[float]]:
    """Reward minus the mean of its group, in standard deviations of the group."""
    return [_scaled(group, _deviation(group)) for group in group_mean(groups)]


def reinforce_plus_plus(groups: Rewards) -> list[list[float]]:
    """Reward minus the mean of all groups, in standard deviations of all groups; each response counts once.

    In the paper each token's advantage also has a KL penalty and counts separately.
    """
    _check_finite(groups)
    centred = _centred([reward for group in groups for reward in group])
    return _regrouped(_scaled(centred, _deviation(centred)), groups)


def reinforce_plus_plus_baseline(groups: Rewards) -> list[list[float]]:
    """Reward minus the mean of its group, in standard deviations of that difference over all groups."""
    centred = [advantage for group in group_mean(groups) for advantage in group]
    return _regrouped(_scaled(centred, _deviation(centred)), groups)


def maxrl(groups: Rewards) -> list[list[float]]:
    """Reward minus the mean of its group, in means of the group: rare successes weigh most.

    Raises InputError for a negative reward too: the paper's rewards are 0 or 1.
    """
    advantages = group_mean(groups)
    if worst := [reward for group in groups for reward in group if reward < 0]:
        raise InputError(f"a reward of {worst[0]} for the advantage maxrl", expected="rewards of at least 0")
    means = [sum(rewards) / len(rewards) if rewards else 0.0 for rewards in groups]
    return [
        _scaled(group, mean, epsilon=0.0) if mean > 0 else group for group, mean in zip(advantages, means, strict=True)
    ]


ADVANTAGES: dict[str, Estimator] = {
    estimator.__name__: estimator
    for estimator in (group_mean, leave_one_out, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, maxrl)
}
"""The estimators by their names in configs."""


def make_estimator(advantage: str) -> Estimator:
    """The estimator of that name, or at the import path `package.module:function`.

    Raises InputError for one that can't be used.
    """
    return _own_estimator(advantage) if ":" in advantage else ADVANTAGES[advantage]


@functools.cache
def _own_estimator(path: str) -> Estimator:
    """Imports and tries `package.module:function`, called as `function(rewards)`.

    It and its estimator raise InputError unless the function returns a finite number per reward, in the same shape.
    """
    function = imported_function("training.advantage", path, ("rewards",))

    def unusable(problem: str) -> InputError:
        return InputError(f'"{path}", which can\'t be used: {problem}', key="training.advantage")

    def estimate(groups: Rewards) -> list[list[float]]:
        try:
            advantages = [[float(value) for value in row] for row in function([list(group) for group in groups])]
        except Exception as error:  # whatever a user's function raises
            raise unusable(f"{type(error).__name__}: {' '.join(str(error).split())}") from error
        sizes, expected = [len(row) for row in advantages], [len(group) for group in groups]
        if sizes != expected:
            raise unusable(f"it returned groups of {sizes} values; expected {expected}, one per reward")
        if bad := [value for row in advantages for value in row if not isfinite(value)]:
            raise unusable(f"an advantage is {bad[0]}; expected a finite number")
        return advantages

    estimate([[1.0, 0.0], [0.5, 0.5, 0.5]])
    return estimate


def _check_finite(groups: Rewards) -> None:
    for i, group in enumerate(groups):
        for reward in group:
            if not isfinite(reward):
                raise InputError(f"group {i} of the batch has a reward of {reward}", expected="a finite number")


def _centred(values: Sequence[float]) -> list[float]:
    """Values minus their mean; exactly 0 if all are equal, where rounding of the mean would leave a remainder."""
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def _deviation(centred: Sequence[float]) -> float:
    """Standard deviation of values whose mean is 0."""
    return hypot(*centred) / sqrt(len(centred) - 1) if len(centred) > 1 else 0.0


def _scaled(values: Sequence[float], unit: float, epsilon: float = _EPSILON) -> list[float]:
    return [value / (unit + epsilon) for value in values]


def _regrouped(values: Sequence[float], groups: Rewards) -> list[list[float]]:
    remaining = iter(values)
    return [[next(remaining) for _ in group] for group in groups]
