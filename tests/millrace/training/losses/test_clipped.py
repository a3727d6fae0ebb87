"""PPO's clipped objective against the formula as published, branch by branch, and against finite differences."""

import math

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from support.training.bandit import Bandit, judge, make, pull, vector

from millrace.training.losses.clipped import PpoClip

PPO = make(PpoClip, clip_low=0.2, clip_high=0.3)
# Of the advantages 0.75, −1.25, 0.5, −0.5: inside, clipped below, clipped above, outside where there is no bound.
RATIOS = (1.1, 0.7, 1.5, 6.0)

logprobs = st.floats(-20.0, 0.0)
advantages = st.floats(-10.0, 10.0)


def published(ratio: torch.Tensor, advantage: torch.Tensor) -> torch.Tensor:
    return -torch.minimum(ratio * advantage, ratio.clamp(0.8, 1.3) * advantage)


@given(logprobs, logprobs, advantages)
def test_the_loss_and_its_gradient_are_those_of_the_published_formula(
    trainer: float, rollout: float, advantage: float
) -> None:
    ratio = math.exp(trainer - rollout)
    # On a bound the formula has a kink.
    assume(min(abs(ratio - 0.8), abs(ratio - 1.3)) > 1e-9)
    trainer_logprobs = vector(trainer, requires_grad=True)
    expected = published((trainer_logprobs - rollout).exp(), vector(advantage))
    (grad,) = torch.autograd.grad(expected.sum(), trainer_logprobs)
    judged = judge(PPO, trainer, rollout, advantage)
    assert judged.loss.item() == pytest.approx(expected.item(), rel=1e-12, abs=1e-300)
    assert pull(PPO, trainer, rollout, advantage) == pytest.approx(-grad.item(), rel=1e-12, abs=1e-300)
    assert judged.weight.item() * advantage == pytest.approx(-grad.item(), rel=1e-12, abs=1e-300)


@pytest.mark.parametrize(
    ("ratio", "advantage", "weight"),
    [
        (1.25, 1.0, 1.25),
        (1.35, 1.0, 0.0),
        (1.35, -1.0, 1.35),
        (50.0, -1.0, 50.0),
        (0.85, -1.0, 0.85),
        (0.75, -1.0, 0.0),
        (0.75, 1.0, 0.75),
        (0.01, 1.0, 0.01),
    ],
)
def test_a_token_lets_go_only_past_the_bound_that_its_advantage_drives_it_to(
    ratio: float, advantage: float, weight: float
) -> None:
    judged = judge(PPO, -3.0 + math.log(ratio), -3.0, advantage)
    assert judged.weight.item() == pytest.approx(weight)
    assert judged.clipped.item() == (weight == 0.0)
    assert pull(PPO, -3.0 + math.log(ratio), -3.0, advantage) == pytest.approx(weight * advantage)


def test_autograd_agrees_with_finite_differences_of_the_published_formula() -> None:
    bandit = Bandit(RATIOS)

    def objective(logits_NV: torch.Tensor) -> torch.Tensor:
        return published(bandit.ratio(logits_NV), bandit.advantages_N).sum()

    gradient_NV = bandit.gradient(PPO)
    torch.testing.assert_close(gradient_NV, bandit.central_differences(objective), rtol=1e-7, atol=1e-8)
    assert [bool(row.any()) for row in gradient_NV] == [True, False, False, True]
