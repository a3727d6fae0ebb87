"""Importance weights clipped from above: AIPO and CISPO against closed forms and finite differences in float64."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.training.bandit import Bandit, judge, make, pull, vector

from millrace.training.losses.clipped import PpoClip
from millrace.training.losses.truncated import Aipo, Cispo

RHO = 2.0
AIPO = make(Aipo, max_importance_ratio=RHO)
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
    aipo = make(Aipo, max_importance_ratio=rho)
    assert pull(aipo, trainer, rollout, advantage) == pytest.approx(weight * advantage, rel=1e-12, abs=1e-300)


@given(logprobs, logprobs, advantages, rhos)
def test_the_loss_is_the_weighted_log_probability_and_the_ratio_comes_back_unclipped(
    trainer: float, rollout: float, advantage: float, rho: float
) -> None:
    judged = judge(make(Aipo, max_importance_ratio=rho), trainer, rollout, advantage)
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


CISPO = make(Cispo, clip_high=0.3)
CISPO_RATIOS = (1.1, 0.7, 1.5, 6.0)


@given(logprobs, logprobs, st.floats(-10.0, 10.0), st.floats(0.01, 10.0))
def test_under_cispo_a_token_weighs_its_ratio_up_to_1_plus_epsilon(
    trainer: float, rollout: float, advantage: float, clip_high: float
) -> None:
    weight = min(math.exp(trainer - rollout), 1 + clip_high)
    judged = judge(make(Cispo, clip_high=clip_high), trainer, rollout, advantage)
    assert judged.weight.item() == pytest.approx(weight, rel=1e-12)
    pulled = pull(make(Cispo, clip_high=clip_high), trainer, rollout, advantage)
    assert pulled == pytest.approx(weight * advantage, rel=1e-12, abs=1e-300)


def test_under_cispo_a_token_above_the_bound_keeps_pulling_where_ppo_lets_go() -> None:
    ratio = -1.0, -1.0 - math.log(1.5)
    assert pull(make(PpoClip, clip_low=0.2, clip_high=0.3), *ratio, 1.0) == 0.0
    assert pull(CISPO, *ratio, 1.0) == pytest.approx(1.3)


def test_cispos_gradient_is_that_of_finite_differences_at_fixed_weights() -> None:
    bandit = Bandit(CISPO_RATIOS)
    weights_N = bandit.ratio(bandit.logits_NV).clamp(max=1.3)

    def surrogate(logits_NV: torch.Tensor) -> torch.Tensor:
        return -(weights_N * bandit.advantages_N * bandit.logprobs(logits_NV)).sum()

    torch.testing.assert_close(bandit.gradient(CISPO), bandit.central_differences(surrogate), rtol=1e-7, atol=1e-8)


def test_cispo_is_aipo_at_the_same_bound_and_another_loss_at_another() -> None:
    bandit = Bandit(CISPO_RATIOS)
    assert torch.equal(bandit.gradient(CISPO), bandit.gradient(make(Aipo, max_importance_ratio=1.3)))
    assert not torch.equal(bandit.gradient(CISPO), bandit.gradient(make(Aipo, max_importance_ratio=2.0)))


def test_under_cispo_a_ratio_that_overflows_weighs_the_bound() -> None:
    judged = judge(CISPO, -1.0, -1001.0, 1.0)
    assert judged.importance_ratio.item() == math.inf
    assert judged.loss.item() == judged.weight.item() == pytest.approx(1.3)
