"""The estimators of a KL divergence against the table in Schulman's note, and against whole distributions."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.losses import KlEstimator
from millrace.training.objective import kl_to_reference

# joschu.net/blog/kl-approx.html: π is N(0, 1) and the reference N(μ, 1); bias and standard deviation over the true KL.
TABLE = [
    (0.1, "k1", 0.0, 20.0),
    (0.1, "k2", 0.002, 1.42),
    (0.1, "k3", 0.0, 1.42),
    (1.0, "k1", 0.0, 2.0),
    (1.0, "k2", 0.25, 1.73),
    (1.0, "k3", 0.0, 1.7),
]
logits = st.lists(st.floats(-6, 6), min_size=4, max_size=4)


@pytest.mark.parametrize(("shift", "estimator", "bias", "deviation"), TABLE)
def test_bias_and_deviation_are_those_of_schulmans_table(
    shift: float, estimator: KlEstimator, bias: float, deviation: float
) -> None:
    # Gauss-Hermite quadrature takes the mean over π without sampling.
    nodes, weights = np.polynomial.hermite_e.hermegauss(80)
    x, weight = torch.from_numpy(nodes), torch.from_numpy(weights / math.sqrt(2 * math.pi))
    estimates = kl_to_reference(estimator, -(x**2) / 2, -((x - shift) ** 2) / 2)
    true = shift**2 / 2
    mean = (weight * estimates).sum().item()
    spread = math.sqrt((weight * (estimates - mean) ** 2).sum().item())
    # The note prints two or three digits, from samples.
    assert mean / true - 1 == pytest.approx(bias, abs=0.0006)
    assert spread / true == pytest.approx(deviation, abs=0.006)


def mean_gradient(estimator: KlEstimator, logits_V: torch.Tensor, ref_logprobs_V: torch.Tensor) -> torch.Tensor:
    """By logits, over samples of π, which are not differentiated."""
    live_V = logits_V.clone().requires_grad_()
    logprobs_V = torch.log_softmax(live_V, 0)
    mean = (logprobs_V.exp().detach() * kl_to_reference(estimator, logprobs_V, ref_logprobs_V)).sum()
    (gradient_V,) = torch.autograd.grad(mean, live_V)
    return gradient_V


def gradient_of_divergence(logits_V: torch.Tensor, ref_logprobs_V: torch.Tensor, *, forward: bool) -> torch.Tensor:
    """Of KL(π‖π_ref) by logits, or of KL(π_ref‖π) if `forward`."""
    live_V = logits_V.clone().requires_grad_()
    apart_V = torch.log_softmax(live_V, 0) - ref_logprobs_V
    weights_V = ref_logprobs_V.exp() if forward else torch.softmax(live_V, 0)
    (gradient_V,) = torch.autograd.grad((weights_V * (-apart_V if forward else apart_V)).sum(), live_V)
    return gradient_V


@settings(max_examples=50)
@given(policy=logits, reference=logits)
def test_each_estimator_has_the_gradient_of_the_divergence_that_it_is_documented_with(
    policy: list[float], reference: list[float]
) -> None:
    logits_V = torch.tensor(policy, dtype=torch.float64)
    ref_logprobs_V = torch.log_softmax(torch.tensor(reference, dtype=torch.float64), 0)
    expected = {
        "k1": torch.zeros_like(logits_V),
        "k2": gradient_of_divergence(logits_V, ref_logprobs_V, forward=False),
        "k3": gradient_of_divergence(logits_V, ref_logprobs_V, forward=True),
    }
    estimators: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
    for estimator in estimators:
        found_V = mean_gradient(estimator, logits_V, ref_logprobs_V)
        torch.testing.assert_close(found_V, expected[estimator], rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
@given(policy=logits, reference=logits)
def test_k1_and_k3_are_the_divergence_in_the_mean(policy: list[float], reference: list[float]) -> None:
    logprobs_V, ref_logprobs_V = (
        torch.log_softmax(torch.tensor(one, dtype=torch.float64), 0) for one in (policy, reference)
    )
    divergence = (logprobs_V.exp() * (logprobs_V - ref_logprobs_V)).sum()
    for estimator in ("k1", "k3"):
        mean = (logprobs_V.exp() * kl_to_reference(estimator, logprobs_V, ref_logprobs_V)).sum()
        torch.testing.assert_close(mean, divergence, rtol=1e-9, atol=1e-12)
