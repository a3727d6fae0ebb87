"""The estimators of a KL divergence against the table in Schulman's note, and against whole distributions."""

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.training.bandit import tokens_of

from configs.losses import KlConfig, KlEstimator
from millrace.training.objective import kl_penalty, kl_to_reference

# joschu.net/blog/kl-approx.html: π is N(0, 1) and the reference N(μ, 1); bias and standard deviation over the true KL.
TABLE = [
    (0.1, "k1", 0.0, 20.0),
    (0.1, "k2", 0.002, 1.42),
    (0.1, "k3", 0.0, 1.42),
    (1.0, "k1", 0.0, 2.0),
    (1.0, "k2", 0.25, 1.73),
    (1.0, "k3", 0.0, 1.7),
]
logits = st.lists(st.floats(-3, 3), min_size=4, max_size=4)
Objective = Callable[[torch.Tensor], torch.Tensor]
"""Of a policy's log-probabilities, [V]."""


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


def logprobs(values: list[float]) -> torch.Tensor:
    return torch.log_softmax(torch.tensor(values, dtype=torch.float64), 0)


def gradient(objective: Objective, policy: list[float]) -> torch.Tensor:
    """[V] by the policy's logits."""
    live_V = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    (gradient_V,) = torch.autograd.grad(objective(torch.log_softmax(live_V, 0)), live_V)
    return gradient_V


def divergence(ref_V: torch.Tensor) -> Objective:
    """KL(π‖π_ref)."""
    return lambda pi_V: (pi_V.exp() * (pi_V - ref_V)).sum()


def mean_penalty(kl: KlConfig, mu_V: torch.Tensor, ref_V: torch.Tensor) -> Objective:
    """The mean of the penalty over samples of another policy, μ."""

    def mean(pi_V: torch.Tensor) -> torch.Tensor:
        tokens = tokens_of(pi_V, mu_V, torch.ones(4, dtype=torch.float64))
        return (mu_V.exp() * kl_penalty(kl, replace(tokens, reference_logprobs_N=ref_V))).sum()

    return mean


def assert_same(gradient_V: torch.Tensor, expected_V: torch.Tensor) -> None:
    torch.testing.assert_close(gradient_V, expected_V, rtol=1e-9, atol=1e-12)


@settings(max_examples=50)
@given(policy=logits, reference=logits)
def test_each_estimator_has_its_documented_mean_and_gradient(policy: list[float], reference: list[float]) -> None:
    ref_V = logprobs(reference)

    def mean(estimator: KlEstimator) -> Objective:
        # Samples are not differentiated.
        return lambda pi_V: (pi_V.exp().detach() * kl_to_reference(estimator, pi_V, ref_V)).sum()

    def forward(pi_V: torch.Tensor) -> torch.Tensor:
        return (ref_V.exp() * (ref_V - pi_V)).sum()

    assert_same(gradient(mean("k1"), policy), torch.zeros(4, dtype=torch.float64))
    assert_same(gradient(mean("k2"), policy), gradient(divergence(ref_V), policy))
    assert_same(gradient(mean("k3"), policy), gradient(forward, policy))
    pi_V = logprobs(policy)
    for estimator in ("k1", "k3"):
        assert_same(mean(estimator)(pi_V), divergence(ref_V)(pi_V))


@pytest.mark.parametrize("estimator", ["k1", "k3"])
@settings(max_examples=50)
@given(policy=logits, sampler=logits, reference=logits)
def test_an_importance_weighted_estimate_has_the_divergences_gradient_off_policy(
    estimator: str, policy: list[float], sampler: list[float], reference: list[float]
) -> None:
    kl = KlConfig.model_validate({"estimator": estimator, "importance_weighted": True})
    ref_V = logprobs(reference)
    gradient_V = gradient(mean_penalty(kl, logprobs(sampler), ref_V), policy)
    assert_same(gradient_V, gradient(divergence(ref_V), policy))
