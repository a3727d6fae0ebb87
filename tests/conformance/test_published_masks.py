"""Masks of whole responses, and tokens that are not finite, against their publications."""

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from support.training.bandit import make, pulls, random_bandit, tokens_of, vector

from configs.losses import MasksConfig
from millrace.training.losses.base import LossInputs
from millrace.training.losses.excluded import compute_without, masked_responses, not_finite
from millrace.training.losses.factory import LOSSES, Loss

each_loss = pytest.mark.parametrize("loss", [make(name) for name in LOSSES], ids=LOSSES)


def dropped_by_hand(masks: MasksConfig, tokens: LossInputs) -> list[bool]:
    """Computes the formulas with plain floats, response by response."""
    log_ratio = (tokens.trainer_logprobs_N - tokens.rollout_logprobs_N).tolist()
    is_dropped = [False] * len(log_ratio)
    for q in set(tokens.response_N.tolist()):
        places = (tokens.response_N == q).nonzero()[:, 0].tolist()
        ratios = [math.exp(log_ratio[n]) for n in places]
        k3 = sum(ratio - 1 - math.log(ratio) for ratio in ratios) / len(ratios)
        k1 = -sum(math.log(ratio) for ratio in ratios) / len(ratios)
        bad = tokens.advantages_N[places[0]].item() < 0
        dropped = (
            (masks.min_token_ratio is not None and min(ratios) < masks.min_token_ratio)
            or (masks.max_token_ratio is not None and max(ratios) > masks.max_token_ratio)
            or (masks.max_kl is not None and k3 > masks.max_kl)
            or (masks.max_kl_negative is not None and bad and k1 > masks.max_kl_negative)
        )
        for n in places:
            is_dropped[n] = dropped
    return is_dropped


MASKS = (
    {"min_token_ratio": 0.4}, {"max_token_ratio": 2.5}, {"max_kl": 0.3}, {"max_kl_negative": 0.1},
    {"min_token_ratio": 0.3, "max_kl": 0.4},
)  # fmt: skip


@pytest.mark.parametrize("masks", MASKS, ids="-".join)
def test_a_mask_drops_the_responses_of_its_formula(masks: dict[str, float]) -> None:
    config, seen = MasksConfig.model_validate(masks), set()
    for seed in range(40):
        tokens = random_bandit(seed).tokens()
        dropped_N = masked_responses(config, tokens)
        assert dropped_N is not None
        assert dropped_N.tolist() == dropped_by_hand(config, tokens)
        seen |= set(dropped_N.tolist())
    assert seen == {True, False}


def test_without_a_mask_or_tokens_nothing_is_dropped() -> None:
    assert masked_responses(MasksConfig(), random_bandit(0).tokens()) is None
    # The dummy batch of a spare rank.
    empty = tokens_of(vector(), vector(), vector(), lengths=())
    dropped_N = masked_responses(MasksConfig(min_token_ratio=0.5, max_kl=0.1), empty)
    assert dropped_N is not None
    assert dropped_N.tolist() == []


@each_loss
def test_a_dropped_response_has_neither_loss_nor_weight_and_the_others_are_unchanged(loss: Loss) -> None:
    tokens = random_bandit(3).tokens()
    dropped_N = masked_responses(MasksConfig(max_kl=0.3), tokens)
    assert dropped_N is not None
    assert 0 < int(dropped_N.sum()) < len(dropped_N)
    whole, masked = loss(tokens), compute_without(loss, tokens, dropped_N)
    assert torch.equal(masked.loss[~dropped_N], whole.loss[~dropped_N])
    assert torch.equal(masked.weight[~dropped_N], whole.weight[~dropped_N])
    assert not masked.loss[dropped_N].any()
    assert not masked.weight[dropped_N].any()
    assert masked.clipped[dropped_N].all()
    assert torch.equal(masked.importance_ratio, whole.importance_ratio)


@pytest.mark.parametrize("advantage", [1.0, -1.0])
@pytest.mark.parametrize("trainer", [-1.0, -math.inf])
@each_loss
def test_a_token_that_is_not_finite_is_left_out_of_the_gradient(loss: Loss, advantage: float, trainer: float) -> None:
    """Token 1 has a ratio of e^2000, or a probability of 0."""
    tokens = tokens_of(
        vector(-1.0, trainer, -2.0), vector(-1.1, -2001.0, -1.9), vector(0.5, advantage, -0.5), lengths=(1, 1, 1)
    )
    with torch.no_grad():
        bad_N = not_finite(loss(tokens), torch.zeros(3), tokens)
    assert not bad_N[[0, 2]].any()
    live_N = tokens.trainer_logprobs_N.clone().requires_grad_()
    left = compute_without(loss, replace(tokens, trainer_logprobs_N=live_N), bad_N)
    (gradient_N,) = torch.autograd.grad(left.loss.sum(), live_N)
    assert gradient_N.isfinite().all()
    assert left.loss.isfinite().all()
    assert left.weight.isfinite().all()
    others = tokens_of(vector(-1.0, -2.0), vector(-1.1, -1.9), vector(0.5, -0.5))
    torch.testing.assert_close(-gradient_N[[0, 2]], pulls(loss, others), rtol=1e-14, atol=0)


def test_the_ratio_of_a_response_is_that_of_its_finite_tokens() -> None:
    tokens = tokens_of(vector(-1.0, -math.inf, -2.0), vector(-1.1, -1.0, -1.9), vector(1.0, 1.0, 1.0), lengths=(3,))
    bad_N = not_finite(make("reinforce")(tokens), torch.zeros(3), tokens)
    assert bad_N.tolist() == [False, True, False]
    outputs = compute_without(make("sequence_mask"), tokens, bad_N)
    assert outputs.weight.tolist() == pytest.approx([1.0, 0.0, 1.0])


@settings(max_examples=50)
@given(trainer=st.floats(-5, 0), rollout=st.floats(-5000, 0), d=st.integers(1, 4), advantage=st.sampled_from((1.0, -1)))
def test_interpolated_decoupled_ppo_has_a_finite_loss_wherever_it_has_no_gradient(
    trainer: float, rollout: float, d: int, advantage: float
) -> None:
    loss = make("decoupled_ppo", proximal="interpolated")
    tokens = tokens_of(
        torch.tensor([trainer]), torch.tensor([rollout]), torch.tensor([advantage]), lengths=(1,), staleness=(d,)
    )
    outputs = loss(tokens)
    assume(outputs.weight.item() == 0)
    assert math.isfinite(outputs.loss.item())


@each_loss
def test_no_loss_has_a_gradient_by_the_policy_that_sampled(loss: Loss) -> None:
    tokens = random_bandit(2).tokens()
    live_N, rollout_N = (one.clone().requires_grad_() for one in (tokens.trainer_logprobs_N, tokens.rollout_logprobs_N))
    outputs = loss(replace(tokens, trainer_logprobs_N=live_N, rollout_logprobs_N=rollout_N))
    (gradient_N,) = torch.autograd.grad(outputs.loss.sum(), rollout_N, allow_unused=True, materialize_grads=True)
    assert not gradient_N.any()
    assert [tensor.requires_grad for tensor in outputs[:4]] == [True, False, False, False]


def test_a_mask_and_a_bound_on_weights_act_together() -> None:
    tokens = tokens_of(vector(-1.0, -1.0, -1.0), vector(-3.0, -1.0, -9.0), vector(1.0, 1.0, 1.0), lengths=(2, 1))
    dropped_N = masked_responses(MasksConfig(max_token_ratio=100), tokens)
    outputs = compute_without(make("aipo", max_importance_ratio=2), tokens, dropped_N)
    assert outputs.weight.tolist() == [2.0, 1.0, 0.0]
    assert outputs.clipped.tolist() == [True, False, True]
