"""The advantages against their papers' formulas in exact fractions, rounded once."""

from collections.abc import Callable, Sequence
from fractions import Fraction
from math import sqrt
from statistics import variance

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from millrace.training.samples import ADVANTAGES

Exact = Sequence[Fraction]
EPSILON = 1e-6
rewards = st.lists(st.integers(0, 8).map(lambda eighths: Fraction(eighths, 8)), min_size=1, max_size=6)
batches = st.lists(rewards, min_size=1, max_size=4)


def mean(values: Exact) -> Fraction:
    return sum(values, Fraction(0)) / len(values)


def centred(values: Exact) -> list[Fraction]:
    return [value - mean(values) for value in values]


def unit(values: Exact) -> float:
    """Standard deviation of a sample: over n − 1."""
    return sqrt(variance(values)) if len(values) > 1 else 0.0


def in_units(values: Exact, deviation: float) -> list[float]:
    return [float(value) / (deviation + EPSILON) for value in values]


def flat(groups: Sequence[Sequence[Fraction]]) -> list[Fraction]:
    return [reward for group in groups for reward in group]


def like(groups: Sequence[Exact], values: Sequence[float]) -> list[list[float]]:
    rest = iter(values)
    return [[next(rest) for _ in group] for group in groups]


def group_mean(groups: Sequence[Exact]) -> list[list[float]]:
    """Dr. GRPO, arXiv 2503.20783: r − mean."""
    return [[float(value) for value in centred(group)] for group in groups]


def leave_one_out(groups: Sequence[Exact]) -> list[list[float]]:
    """RLOO, arXiv 2402.14740: r less the mean of the others."""
    return [
        [float(r - mean([*group[:i], *group[i + 1 :]])) if len(group) > 1 else 0.0 for i, r in enumerate(group)]
        for group in groups
    ]


def grpo(groups: Sequence[Exact]) -> list[list[float]]:
    """GRPO, arXiv 2402.03300, §4.1.2: (r − mean)/std."""
    return [in_units(centred(group), unit(group)) for group in groups]


def reinforce_plus_plus(groups: Sequence[Exact]) -> list[list[float]]:
    """REINFORCE++, arXiv 2501.03262: (r − mean of the batch)/std of the batch."""
    return like(groups, in_units(centred(flat(groups)), unit(flat(groups))))


def reinforce_plus_plus_baseline(groups: Sequence[Exact]) -> list[list[float]]:
    """REINFORCE++-baseline, arXiv 2501.03262: r − mean of the group, over the batch's std of that."""
    values = flat([centred(group) for group in groups])
    return like(groups, in_units(values, unit(values)))


def maxrl(groups: Sequence[Exact]) -> list[list[float]]:
    """MaxRL, arXiv 2602.02710: (r − mean)/mean; nothing to learn from a group without a success."""
    return [
        [float(value / mean(group)) for value in centred(group)] if mean(group) else [0.0] * len(group)
        for group in groups
    ]


FORMULAS = (group_mean, leave_one_out, grpo, reinforce_plus_plus, reinforce_plus_plus_baseline, maxrl)


@pytest.mark.slow
@pytest.mark.parametrize("formula", FORMULAS)
@settings(max_examples=50)
@given(groups=batches)
def test_an_advantage_is_the_published_one(
    formula: Callable[[Sequence[Exact]], list[list[float]]], groups: list[list[Fraction]]
) -> None:
    result = ADVANTAGES[formula.__name__]([[float(reward) for reward in group] for group in groups])
    for ours, expected in zip(result, formula(groups), strict=True):
        assert ours == pytest.approx(expected, rel=1e-12, abs=1e-15)


def test_every_advantage_is_compared_with_a_publication() -> None:
    assert {formula.__name__ for formula in FORMULAS} == set(ADVANTAGES)
