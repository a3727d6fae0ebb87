"""How far rollouts are from the policy: each measure against its definition."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from millrace.training.step_report import chi_square, effective_sample_size, ratio_quantiles

ratios = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50).map(np.array)


def test_on_policy_all_say_so() -> None:
    ones_N = np.ones(7)
    assert ratio_quantiles(ones_N) == [1, 1, 1, 1]
    assert effective_sample_size(ones_N) == 1
    assert chi_square(ones_N) == 0


def test_quantiles_are_ratios_of_tokens_in_any_order() -> None:
    ratio_N = np.arange(1.0, 102.0)
    np.random.default_rng(1).shuffle(ratio_N)
    assert ratio_quantiles(ratio_N) == [6, 51, 96, 101]


@given(ratios)
def test_quantiles_are_in_order_and_the_last_is_the_largest(ratio_N: np.ndarray) -> None:
    quantiles = ratio_quantiles(ratio_N)
    assert quantiles == sorted(quantiles)
    assert quantiles[-1] == ratio_N.max()
    assert set(quantiles) <= set(ratio_N.tolist())


def test_a_single_tokens_ratio_is_every_quantile() -> None:
    assert ratio_quantiles(np.array([2.5])) == [2.5, 2.5, 2.5, 2.5]


def test_infinite_ratios_are_infinite_quantiles_and_not_nan() -> None:
    assert ratio_quantiles(np.array([1.0, math.inf, math.inf, 2.0])) == [1, 2, math.inf, math.inf]
    assert chi_square(np.array([1.0, math.inf])) == math.inf


def test_of_equal_weights_all_samples_count_and_of_one_weight_one() -> None:
    assert effective_sample_size(np.full(8, 3.0)) == pytest.approx(1)
    assert effective_sample_size(np.array([5.0, 0.0, 0.0, 0.0])) == pytest.approx(1 / 4)
    assert effective_sample_size(np.zeros(4)) == 0


@given(ratios)
def test_the_effective_sample_size_follows_from_the_variation_of_weights(weight_N: np.ndarray) -> None:
    varies = weight_N.var() / weight_N.mean() ** 2
    assert effective_sample_size(weight_N) == pytest.approx(1 / (1 + varies))
    assert 0 < effective_sample_size(weight_N) <= 1 + 1e-12


def test_on_all_of_mus_tokens_chi_square_is_the_divergence() -> None:
    # μ has each token as often as it is likely: eighths.
    mu_V, pi_V = np.array([1, 2, 5]) / 8, np.array([0.3, 0.3, 0.4])
    sampled_N = np.repeat(np.arange(3), [1, 2, 5])
    assert chi_square((pi_V / mu_V)[sampled_N]) == pytest.approx(((pi_V - mu_V) ** 2 / mu_V).sum())
