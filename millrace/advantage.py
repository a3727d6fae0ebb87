"""Advantages: how much better a response did than others, from the rewards of all the batch's groups.

    r reward; r̄, s mean and standard deviation in its group of n; b̄, t those over the whole batch

    group_mean                    r − r̄                    LlamaRL, arXiv 2505.24034; Dr. GRPO, arXiv 2503.20783
    leave_one_out                 (r − r̄) · n / (n − 1)    RLOO, arXiv 2402.14740
    grpo                          (r − r̄) / (s + 1e-6)     arXiv 2402.03300
    reinforce_plus_plus           (r − b̄) / (t + 1e-6)     arXiv 2501.03262
    reinforce_plus_plus_baseline  (r − r̄) / (t' + 1e-6)    arXiv 2501.03262; t' of r − r̄ over the batch
    maxrl                         (r − r̄) / r̄              MaxRL, arXiv 2602.02710

Standard deviations have n − 1 below the line, as in the code that people run (TRL, verl); the papers don't say which.
Rewards that are all equal teach nothing: exactly 0. The same holds for a group of one, but for `reinforce_plus_plus`.
"""

from collections.abc import Callable, Sequence
from math import hypot, isfinite, sqrt

from millrace.errors import InputError

_EPSILON = 1e-6
"""Keeps rewards that differ by rounding alone from becoming advantages of ±1."""

Estimator = Callable[[Sequence[Sequence[float]]], list[list[float]]]


def group_mean(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean of its group. Raises InputError for a reward that is not finite, as all of them do.

    With the aggregation `constant` that is Dr. GRPO.
    """
    _check_finite(groups)
    return [_centred(rewards) for rewards in groups]


def leave_one_out(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean of its siblings' (RLOO, arXiv 2402.14740)."""
    return [
        [advantage * len(group) / (len(group) - 1) if len(group) > 1 else 0.0 for advantage in group]
        for group in group_mean(groups)
    ]


def grpo(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean of its group, in standard deviations of the group (arXiv 2402.03300, §4.1.2)."""
    return [_scaled(group, _deviation(group)) for group in group_mean(groups)]


def reinforce_plus_plus(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean of the batch, in standard deviations of the batch (arXiv 2501.03262).

    There each token's advantage also has a KL penalty and counts in mean and deviation; here each response counts once.
    """
    _check_finite(groups)
    centred = _centred([reward for group in groups for reward in group])
    return _regrouped(_scaled(centred, _deviation(centred)), groups)


def reinforce_plus_plus_baseline(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean of its group, in standard deviations of that over the batch (arXiv 2501.03262)."""
    centred = [advantage for group in group_mean(groups) for advantage in group]
    return _regrouped(_scaled(centred, _deviation(centred)), groups)


def maxrl(groups: Sequence[Sequence[float]]) -> list[list[float]]:
    """Reward minus the mean of its group, in means of the group (arXiv 2602.02710): rare successes weigh most.

    Raises InputError for a negative reward: the paper's rewards are 0 or 1, and a share of nothing has no meaning.
    """
    advantages = group_mean(groups)
    if worst := [reward for group in groups for reward in group if reward < 0]:
        raise InputError(f"the advantage maxrl got a reward of {worst[0]}; expected rewards of at least 0")
    means = [sum(rewards) / len(rewards) if rewards else 0.0 for rewards in groups]
    return [
        _scaled(group, mean, epsilon=0.0) if mean > 0 else group for group, mean in zip(advantages, means, strict=True)
    ]


ADVANTAGES: dict[str, Estimator] = {
    estimator.__name__: estimator
    for estimator in (group_mean, leave_one_out, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, maxrl)
}
"""By the names that configs have: the rewards of all the batch's groups ─► one advantage a reward, in their order."""


def _check_finite(groups: Sequence[Sequence[float]]) -> None:
    for i, group in enumerate(groups):
        for reward in group:
            if not isfinite(reward):
                raise InputError(f"group {i} of the batch has a reward of {reward}; expected a finite number")


def _centred(values: Sequence[float]) -> list[float]:
    """Less their mean; exactly 0 where all are equal, which rounding of the mean would spoil."""
    if not values or min(values) == max(values):
        return [0.0] * len(values)
    mean = sum(values) / len(values)
    return [value - mean for value in values]


def _deviation(centred: Sequence[float]) -> float:
    """Standard deviation of values whose mean is 0."""
    return hypot(*centred) / sqrt(len(centred) - 1) if len(centred) > 1 else 0.0


def _scaled(values: Sequence[float], unit: float, epsilon: float = _EPSILON) -> list[float]:
    return [value / (unit + epsilon) for value in values]


def _regrouped(values: Sequence[float], groups: Sequence[Sequence[float]]) -> list[list[float]]:
    remaining = iter(values)
    return [[next(remaining) for _ in group] for group in groups]
