"""CISPO against its closed form, against finite differences, and beside AIPO."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from support.bandit import Bandit, judge, pull

from millrace.losses.aipo import Aipo
from millrace.losses.cispo import Cispo
from millrace.losses.ppo_clip import PpoClip

CISPO = Cispo(clip_high=0.3)
RATIOS = (1.1, 0.7, 1.5, 6.0)

logprobs = st.floats(-20.0, 0.0)


@given(logprobs, logprobs, st.floats(-10.0, 10.0), st.floats(0.01, 10.0))
def test_a_token_weighs_its_ratio_up_to_1_plus_epsilon(
    trainer: float, rollout: float, advantage: float, clip_high: float
) -> None:
    weight = min(math.exp(trainer - rollout), 1 + clip_high)
    judged = judge(Cispo(clip_high=clip_high), trainer, rollout, advantage)
    assert judged.weight.item() == pytest.approx(weight, rel=1e-12)
    pulled = pull(Cispo(clip_high=clip_high), trainer, rollout, advantage)
    assert pulled == pytest.approx(weight * advantage, rel=1e-12, abs=1e-300)


def test_a_token_above_the_bound_keeps_pulling_where_ppo_lets_go() -> None:
    ratio = -1.0, -1.0 - math.log(1.5)
    assert pull(PpoClip(clip_low=0.2, clip_high=0.3), *ratio, 1.0) == 0.0
    assert pull(CISPO, *ratio, 1.0) == pytest.approx(1.3)


def test_autograd_agrees_with_finite_differences_of_the_surrogate_at_fixed_weights() -> None:
    bandit = Bandit(RATIOS)
    weights_N = bandit.ratio(bandit.logits_NV).clamp(max=1.3)

    def surrogate(logits_NV: torch.Tensor) -> torch.Tensor:
        return -(weights_N * bandit.advantages_N * bandit.logprobs(logits_NV)).sum()

    torch.testing.assert_close(bandit.gradient(CISPO), bandit.central_differences(surrogate), rtol=1e-7, atol=1e-8)


def test_it_is_aipo_at_the_same_bound_and_another_loss_at_another() -> None:
    bandit = Bandit(RATIOS)
    assert torch.equal(bandit.gradient(CISPO), bandit.gradient(Aipo(max_importance_ratio=1.3)))
    assert not torch.equal(bandit.gradient(CISPO), bandit.gradient(Aipo(max_importance_ratio=2.0)))


def test_a_ratio_that_overflows_weighs_the_bound() -> None:
    judged = judge(CISPO, -1.0, -1001.0, 1.0)
    assert judged.importance_ratio.item() == math.inf
    assert judged.loss.item() == judged.weight.item() == pytest.approx(1.3)
