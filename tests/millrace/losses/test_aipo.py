"""AIPO against closed forms, against REINFORCE, and against finite differences in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bandit import Bandit, judge, pull, vector

from millrace.losses.aipo import Aipo

RHO = 2.0
AIPO = Aipo(max_importance_ratio=RHO)
# On policy, below ρ, far above it, far below it.
RATIOS = (1.0, 0.4, 6.0, 0.01)

logprobs = st.floats(-20.0, 0.0)
advantages = st.floats(-10.0, 10.0)
rhos = st.floats(1.0, 10.0)


@given(logprobs, logprobs, advantages, rhos)
def test_a_token_weighs_the_smaller_of_its_importance_ratio_and_rho(
    trainer: float, rollout: float, advantage: float, rho: float
) -> None:
    weight = min(math.exp(trainer - rollout), rho)
    aipo = Aipo(max_importance_ratio=rho)
    assert pull(aipo, trainer, rollout, advantage) == pytest.approx(weight * advantage, rel=1e-12, abs=1e-300)


@given(logprobs, logprobs, advantages, rhos)
def test_the_loss_is_the_weighted_log_probability_and_the_ratio_comes_back_unclipped(
    trainer: float, rollout: float, advantage: float, rho: float
) -> None:
    judged = judge(Aipo(max_importance_ratio=rho), trainer, rollout, advantage)
    unclipped = math.exp(trainer - rollout)
    weight = min(unclipped, rho)
    assert judged.importance_ratio.item() == pytest.approx(unclipped, rel=1e-12)
    assert judged.weight.item() == pytest.approx(weight, rel=1e-12)
    assert judged.loss.item() == pytest.approx(-weight * advantage * trainer, rel=1e-12, abs=1e-300)


def test_above_rho_a_token_keeps_pulling_where_a_clamped_ratio_would_let_go() -> None:
    trainer, rollout = -0.1, -0.1 - math.log(5.0)
    assert pull(AIPO, trainer, rollout, 1.5) == pytest.approx(RHO * 1.5)
    trap = vector(trainer, requires_grad=True)
    (trapped,) = torch.autograd.grad((-((trap - rollout).exp().clamp(max=RHO)) * 1.5).sum(), trap)
    assert trapped.item() == 0.0


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_small_ratios_are_not_clipped_from_below(ratio: float, advantage: float) -> None:
    assert pull(AIPO, -1.0 + math.log(ratio), -1.0, advantage) == pytest.approx(ratio * advantage)


def test_no_gradient_flows_through_the_weight() -> None:
    # At log π = log μ = −1 a gradient through π/μ would add w·A·log π = −A and cancel the whole pull of the token.
    assert pull(AIPO, -1.0, -1.0, 1.0) == pytest.approx(1.0)


@pytest.mark.parametrize("advantage", [1.0, -1.0, 0.0])
def test_a_ratio_that_overflows_weighs_rho_and_its_loss_is_finite(advantage: float) -> None:
    judged = judge(AIPO, -1.0, -1001.0, advantage)
    assert judged.importance_ratio.item() == math.inf
    assert judged.weight.item() == RHO
    assert judged.loss.item() == RHO * advantage
    assert judged.clipped.item()


def test_autograd_agrees_with_finite_differences_of_the_surrogate_at_fixed_weights() -> None:
    bandit = Bandit(RATIOS)
    weights_N = bandit.ratio(bandit.logits_NV).clamp(max=RHO)

    def surrogate(logits_NV: torch.Tensor) -> torch.Tensor:
        return -(weights_N * bandit.advantages_N * bandit.logprobs(logits_NV)).sum()

    torch.testing.assert_close(bandit.gradient(AIPO), bandit.central_differences(surrogate), rtol=1e-7, atol=1e-8)


def test_autograd_agrees_with_finite_differences_of_the_objective_whose_gradient_it_is() -> None:
    bandit = Bandit(RATIOS)

    def objective(logits_NV: torch.Tensor) -> torch.Tensor:
        # f(r) with r·f'(r) = min(r, ρ): off-policy policy gradient up to ρ, and from there on only its logarithm.
        ratio_N = bandit.ratio(logits_NV)
        f_N = torch.where(ratio_N <= RHO, ratio_N, RHO * (1 + (ratio_N / RHO).log()))
        return -(bandit.advantages_N * f_N).sum()

    torch.testing.assert_close(bandit.gradient(AIPO), bandit.central_differences(objective), rtol=1e-7, atol=1e-8)
