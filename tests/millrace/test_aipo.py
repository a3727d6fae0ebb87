"""AIPO against closed forms, against REINFORCE, and against finite differences in float64."""

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from millrace.losses.aipo import aipo_loss

RHO = 2.0

logprobs = st.floats(-20.0, 0.0)
advantages = st.floats(-10.0, 10.0)
rhos = st.floats(1.0, 10.0)


def vector(*values: float, requires_grad: bool = False) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.float64, requires_grad=requires_grad)


def gradient(trainer: float, rollout: float, advantage: float, rho: float = RHO) -> float:
    """d loss / d log π of a single token."""
    trainer_logprobs = vector(trainer, requires_grad=True)
    loss, _ = aipo_loss(trainer_logprobs, vector(rollout), vector(advantage), max_importance_ratio=rho)
    (grad,) = torch.autograd.grad(loss.sum(), trainer_logprobs)
    return grad.item()


class Bandit:
    """A softmax policy over 5 tokens, three sampled tokens of it, and what the behaviour policy thought of them."""

    def __init__(self) -> None:
        random = torch.Generator().manual_seed(1)
        self.logits_TV = torch.randn(3, 5, dtype=torch.float64, generator=random)
        self.tokens_T = torch.tensor([0, 3, 4])
        self.advantages_T = vector(0.75, -1.25, 0.5)
        # One token on policy, one below ρ, one far above it.
        self.rollout_logprobs_T = self.logprobs(self.logits_TV) - vector(1.0, 0.4, 6.0).log()

    def logprobs(self, logits_TV: torch.Tensor) -> torch.Tensor:
        return torch.log_softmax(logits_TV, dim=-1).gather(1, self.tokens_T[:, None]).squeeze(1)

    def aipo_gradient(self) -> torch.Tensor:
        logits_TV = self.logits_TV.clone().requires_grad_()
        loss_T, _ = aipo_loss(
            self.logprobs(logits_TV), self.rollout_logprobs_T, self.advantages_T, max_importance_ratio=RHO
        )
        (grad,) = torch.autograd.grad(loss_T.sum(), logits_TV)
        return grad

    def central_differences(self, objective: Callable[[torch.Tensor], torch.Tensor], h: float = 1e-6) -> torch.Tensor:
        """d objective(logits) / d logits, without autograd."""
        grad = torch.zeros_like(self.logits_TV)
        for index in range(grad.numel()):
            bump = torch.zeros_like(grad)
            bump.view(-1)[index] = h
            difference = objective(self.logits_TV + bump) - objective(self.logits_TV - bump)
            grad.view(-1)[index] = difference / (2 * h)
        return grad


def test_on_policy_the_gradient_is_that_of_reinforce_with_a_baseline() -> None:
    bandit = Bandit()
    bandit.rollout_logprobs_T = bandit.logprobs(bandit.logits_TV)
    logits_TV = bandit.logits_TV.clone().requires_grad_()
    (reinforce,) = torch.autograd.grad(-(bandit.advantages_T * bandit.logprobs(logits_TV)).sum(), logits_TV)
    torch.testing.assert_close(bandit.aipo_gradient(), reinforce, rtol=0, atol=0)


@given(logprobs, logprobs, advantages, rhos)
def test_a_token_weighs_the_smaller_of_its_importance_ratio_and_rho(
    trainer: float, rollout: float, advantage: float, rho: float
) -> None:
    weight = min(math.exp(trainer - rollout), rho)
    assert gradient(trainer, rollout, advantage, rho) == pytest.approx(-weight * advantage, rel=1e-12, abs=1e-300)


@given(logprobs, logprobs, advantages, rhos)
def test_the_loss_is_the_weighted_log_probability_and_the_ratio_comes_back_unclipped(
    trainer: float, rollout: float, advantage: float, rho: float
) -> None:
    loss, ratio = aipo_loss(vector(trainer), vector(rollout), vector(advantage), max_importance_ratio=rho)
    unclipped = math.exp(trainer - rollout)
    assert ratio.item() == pytest.approx(unclipped, rel=1e-12)
    assert loss.item() == pytest.approx(-min(unclipped, rho) * advantage * trainer, rel=1e-12, abs=1e-300)


def test_above_rho_a_token_keeps_pulling_where_a_clamped_ratio_would_let_go() -> None:
    trainer, rollout = -0.1, -0.1 - math.log(5.0)
    assert gradient(trainer, rollout, 1.5) == pytest.approx(-RHO * 1.5)
    trap = vector(trainer, requires_grad=True)
    (trapped,) = torch.autograd.grad((-((trap - rollout).exp().clamp(max=RHO)) * 1.5).sum(), trap)
    assert trapped.item() == 0.0


@pytest.mark.parametrize("ratio", [1e-1, 1e-3, 1e-6])
@pytest.mark.parametrize("advantage", [1.0, -1.0])
def test_small_ratios_are_not_clipped_from_below(ratio: float, advantage: float) -> None:
    assert gradient(-1.0 + math.log(ratio), -1.0, advantage) == pytest.approx(-ratio * advantage)


def test_no_gradient_flows_through_the_weight() -> None:
    # At log π = log μ = −1 a gradient through π/μ would add w·A·log π = −A and cancel the whole pull of the token.
    assert gradient(-1.0, -1.0, 1.0) == pytest.approx(-1.0)
    trainer_logprobs = vector(-1.0, requires_grad=True)
    _, ratio = aipo_loss(trainer_logprobs, vector(-2.0), vector(1.0), max_importance_ratio=RHO)
    assert not ratio.requires_grad


def test_autograd_agrees_with_finite_differences_of_the_surrogate_at_fixed_weights() -> None:
    bandit = Bandit()
    weights_T = (bandit.logprobs(bandit.logits_TV) - bandit.rollout_logprobs_T).exp().clamp(max=RHO)

    def surrogate(logits_TV: torch.Tensor) -> torch.Tensor:
        return -(weights_T * bandit.advantages_T * bandit.logprobs(logits_TV)).sum()

    torch.testing.assert_close(bandit.aipo_gradient(), bandit.central_differences(surrogate), rtol=1e-7, atol=1e-8)


def test_autograd_agrees_with_finite_differences_of_the_objective_whose_gradient_it_is() -> None:
    bandit = Bandit()

    def objective(logits_TV: torch.Tensor) -> torch.Tensor:
        # f(r) with r·f'(r) = min(r, ρ): off-policy policy gradient up to ρ, and from there on only its logarithm.
        ratio_T = (bandit.logprobs(logits_TV) - bandit.rollout_logprobs_T).exp()
        f_T = torch.where(ratio_T <= RHO, ratio_T, RHO * (1 + (ratio_T / RHO).log()))
        return -(bandit.advantages_T * f_T).sum()

    torch.testing.assert_close(bandit.aipo_gradient(), bandit.central_differences(objective), rtol=1e-7, atol=1e-8)
