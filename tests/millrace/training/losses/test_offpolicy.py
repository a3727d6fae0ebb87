"""How far rollouts are from the policy: each measure against its definition."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.training.step_report import chi_square, effective_sample_size, ratio_quantiles


def doubles(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64)


def quantiles_of(ratio_N: torch.Tensor) -> list[float]:
    return torch.stack(ratio_quantiles(ratio_N)).tolist()


ratios = st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=50).map(lambda values: doubles(*values))


def test_on_policy_all_say_so() -> None:
    ones_N = doubles(*[1.0] * 7)
    assert quantiles_of(ones_N) == [1, 1, 1, 1]
    assert effective_sample_size(ones_N).item() == 1
    assert chi_square(ones_N).item() == 0


def test_quantiles_are_ratios_of_tokens_in_any_order() -> None:
    shuffled_N = torch.randperm(101, generator=torch.Generator().manual_seed(1)).double() + 1
    assert quantiles_of(shuffled_N) == [6, 51, 96, 101]


@given(ratios)
def test_quantiles_are_in_order_and_the_last_is_the_largest(ratio_N: torch.Tensor) -> None:
    quantiles = quantiles_of(ratio_N)
    assert quantiles == sorted(quantiles)
    assert quantiles[-1] == ratio_N.max()
    assert set(quantiles) <= set(ratio_N.tolist())


def test_a_single_tokens_ratio_is_every_quantile() -> None:
    assert quantiles_of(doubles(2.5)) == [2.5, 2.5, 2.5, 2.5]


def test_infinite_ratios_are_infinite_quantiles_and_not_nan() -> None:
    assert quantiles_of(doubles(1.0, math.inf, math.inf, 2.0)) == [1, 2, math.inf, math.inf]
    assert chi_square(doubles(1.0, math.inf)).item() == math.inf


def test_of_equal_weights_all_samples_count_and_of_one_weight_one() -> None:
    assert effective_sample_size(doubles(*[3.0] * 8)).item() == pytest.approx(1)
    assert effective_sample_size(doubles(5.0, 0.0, 0.0, 0.0)).item() == pytest.approx(1 / 4)
    assert effective_sample_size(doubles(0.0, 0.0, 0.0, 0.0)).item() == 0


@given(ratios)
def test_the_effective_sample_size_follows_from_the_variation_of_weights(weight_N: torch.Tensor) -> None:
    varies = float(weight_N.var(correction=0) / weight_N.mean() ** 2)
    assert effective_sample_size(weight_N).item() == pytest.approx(1 / (1 + varies))
    assert 0 < effective_sample_size(weight_N).item() <= 1 + 1e-12


def test_on_all_of_mus_tokens_chi_square_is_the_divergence() -> None:
    # μ has each token as often as it is likely: eighths.
    mu_V, pi_V = doubles(1, 2, 5) / 8, doubles(0.3, 0.3, 0.4)
    sampled_N = torch.arange(3).repeat_interleave(torch.tensor([1, 2, 5]))
    assert chi_square((pi_V / mu_V)[sampled_N]).item() == pytest.approx(float(((pi_V - mu_V) ** 2 / mu_V).sum()))
