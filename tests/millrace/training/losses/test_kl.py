"""The estimators of KL(π‖π_ref) against their formulas, finite differences, and the divergences themselves."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.bandit import vector

from configs.losses import KlEstimator
from millrace.training.objective import kl_to_reference

ESTIMATORS: tuple[KlEstimator, ...] = ("k1", "k2", "k3")
logprobs = st.floats(-20.0, 0.0)


def closed_form(estimator: KlEstimator, trainer: float, reference: float) -> float:
    ratio = math.exp(reference - trainer)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


@pytest.mark.parametrize("estimator", ESTIMATORS)
@given(trainer=logprobs, reference=logprobs)
def test_an_estimate_is_schulmans(estimator: KlEstimator, trainer: float, reference: float) -> None:
    estimate = kl_to_reference(estimator, vector(trainer), vector(reference)).item()
    assert estimate == pytest.approx(closed_form(estimator, trainer, reference), rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_gradient_is_that_of_finite_differences_and_the_reference_has_none(estimator: KlEstimator) -> None:
    random = torch.Generator().manual_seed(1)
    trainer_N = -3 * torch.rand(8, dtype=torch.float64, generator=random)
    reference_N = (-3 * torch.rand(8, dtype=torch.float64, generator=random)).requires_grad_()
    live_N = trainer_N.clone().requires_grad_()
    kl_to_reference(estimator, live_N, reference_N).sum().backward()
    h = 1e-6
    above, below = (kl_to_reference(estimator, trainer_N + step, reference_N.detach()) for step in (h, -h))
    torch.testing.assert_close(live_N.grad, (above - below) / (2 * h), rtol=1e-7, atol=1e-8)
    assert reference_N.grad is None


@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_where_policy_and_reference_agree_it_is_0(estimator: KlEstimator) -> None:
    assert kl_to_reference(estimator, vector(-2.0), vector(-2.0)).item() == 0.0


def test_k3_is_exact_where_the_two_hardly_differ_in_single_precision() -> None:
    apart = 1e-3
    estimate = kl_to_reference("k3", torch.tensor([-1.0 + apart]), torch.tensor([-1.0])).item()
    assert estimate == pytest.approx(apart**2 / 2, rel=1e-3)


def test_only_k3_overflows() -> None:
    estimates = {
        estimator: kl_to_reference(estimator, vector(-1001.0), vector(-1.0)).item() for estimator in ESTIMATORS
    }
    assert estimates == {"k1": -1000.0, "k2": 500_000.0, "k3": math.inf}


def expected_gradient(estimator: KlEstimator, logits_V: torch.Tensor, reference_V: torch.Tensor) -> torch.Tensor:
    """Gradient of the estimate by logits, in the mean over samples of π."""
    live_V = logits_V.clone().requires_grad_()
    log_pi_V = torch.log_softmax(live_V, dim=0)
    (log_pi_V.detach().exp() * kl_to_reference(estimator, log_pi_V, reference_V)).sum().backward()
    assert live_V.grad is not None
    return live_V.grad


def test_the_mean_gradients_of_k1_k2_and_k3_are_those_of_the_table() -> None:
    random = torch.Generator().manual_seed(2)
    logits_V, reference_logits_V = torch.randn(2, 6, dtype=torch.float64, generator=random)
    reference_V = torch.log_softmax(reference_logits_V, dim=0)
    divergences = []
    for forward in (True, False):
        live_V = logits_V.clone().requires_grad_()
        log_pi_V = torch.log_softmax(live_V, dim=0)
        p_V, q_V = (log_pi_V, reference_V) if forward else (reference_V, log_pi_V)
        (p_V.exp() * (p_V - q_V)).sum().backward()
        divergences.append(live_V.grad)
    zero_V = torch.zeros(6, dtype=torch.float64)
    for estimator, gradient_V in zip(ESTIMATORS, (zero_V, *divergences), strict=True):
        torch.testing.assert_close(
            expected_gradient(estimator, logits_V, reference_V), gradient_V, rtol=1e-10, atol=1e-12
        )


@pytest.mark.parametrize("estimator", ["k1", "k3"])
def test_in_the_mean_k1_and_k3_are_the_divergence(estimator: KlEstimator) -> None:
    random = torch.Generator().manual_seed(3)
    log_pi_V, reference_V = torch.log_softmax(torch.randn(2, 6, dtype=torch.float64, generator=random), dim=1)
    divergence = (log_pi_V.exp() * (log_pi_V - reference_V)).sum()
    mean = (log_pi_V.exp() * kl_to_reference(estimator, log_pi_V, reference_V)).sum()
    torch.testing.assert_close(mean, divergence)
