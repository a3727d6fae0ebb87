"""Every loss against its formula, written out in plain floats token by token, and against finite differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.training.bandit import Bandit, make, random_bandit

from millrace.training.losses.factory import Loss

SEEDS = range(12)


@dataclass(frozen=True, kw_only=True)
class Token:
    """A token as plain numbers."""

    pi: float
    mu: float
    advantage: float
    product: float
    """Of the ratios of its response."""
    length: int
    """Of its response."""
    staleness: int

    @property
    def ratio(self) -> float:
        return self.pi / self.mu

    @property
    def mean(self) -> float:
        """Geometric mean of the ratios of its response."""
        return self.product ** (1 / self.length)


def plain(bandit: Bandit) -> list[Token]:
    tokens = bandit.tokens()
    responses = tokens.response_N.tolist()
    pi, mu = tokens.trainer_logprobs_N.exp().tolist(), tokens.rollout_logprobs_N.exp().tolist()
    return [
        Token(
            pi=pi[i],
            mu=mu[i],
            advantage=bandit.advantages_N[i].item(),
            product=math.prod(p / m for p, m, other in zip(pi, mu, responses, strict=True) if other == own),
            length=responses.count(own),
            staleness=int(tokens.staleness_N[i]),
        )
        for i, own in enumerate(responses)
    ]


def released(ratio: float, advantage: float, low: float, high: float) -> bool:
    """PPO's rule."""
    return (advantage > 0 and ratio > 1 + high) or (advantage < 0 and ratio < 1 - low)


def dual_clip(token: Token) -> float:
    gone = released(token.ratio, token.advantage, 0.2, 0.3) or (token.advantage < 0 and token.ratio > 2)
    return 0.0 if gone else token.ratio


def interpolated(token: Token) -> float:
    d = token.staleness
    proximal = token.pi if d == 0 else token.mu ** (1 / d) * token.pi ** (1 - 1 / d)
    return 0.0 if released(token.pi / proximal, token.advantage, 0.2, 0.3) else token.ratio


def sapo(token: Token) -> float:
    gate = (1.5 if token.advantage > 0 else 2.5) * (token.ratio - 1)
    p = 1 / (1 + math.exp(-gate))
    return 4 * p * (1 - p) * token.ratio


def dppo_tv(token: Token) -> float:
    moved = token.pi - token.mu
    gone = (token.advantage > 0 and moved > 0.1) or (token.advantage < 0 and moved < -0.1)
    return 0.0 if gone else min(token.ratio, 3)


WEIGHTS: list[tuple[Loss, Callable[[Token], float], Callable[[Token], float]]] = [
    (make("aipo", max_importance_ratio=2), lambda t: min(t.ratio, 2), lambda t: t.ratio),
    (make("reinforce"), lambda t: 1.0, lambda t: 1.0),
    (
        make("ppo_clip", clip_low=0.2, clip_high=0.3),
        lambda t: 0.0 if released(t.ratio, t.advantage, 0.2, 0.3) else t.ratio,
        lambda t: t.ratio,
    ),
    (make("ppo_clip", clip_low=0.2, clip_high=0.3, dual_clip=2), dual_clip, lambda t: t.ratio),
    (make("decoupled_ppo", clip_low=0.2, clip_high=0.3, proximal="recomputed"), lambda t: t.ratio, lambda t: t.ratio),
    (make("decoupled_ppo", clip_low=0.2, clip_high=0.3, proximal="interpolated"), interpolated, lambda t: t.ratio),
    (make("tis", max_importance_ratio=1.5), lambda t: min(t.ratio, 1.5), lambda t: t.ratio),
    (make("sequence_tis", max_importance_ratio=1.5), lambda t: min(t.product, 1.5), lambda t: t.product),
    (make("icepop", low=0.5, high=3), lambda t: t.ratio if 0.5 <= t.ratio <= 3 else 0.0, lambda t: t.ratio),
    (
        make("sequence_mask", low=0.5, high=3),
        lambda t: t.product if 0.5 <= t.product <= 3 else 0.0,
        lambda t: t.product,
    ),
    (
        make("geometric_mask", low=0.8, high=1.5, max_importance_ratio=2),
        lambda t: min(t.ratio, 2) if 0.8 <= t.mean <= 1.5 else 0.0,
        lambda t: t.ratio,
    ),
    (make("cispo", clip_high=0.3), lambda t: min(t.ratio, 1.3), lambda t: t.ratio),
    (
        make("gspo", clip_low=0.1, clip_high=0.2),
        lambda t: 0.0 if released(t.mean, t.advantage, 0.1, 0.2) else t.mean,
        lambda t: t.mean,
    ),
    (make("sapo", tau_positive=1.5, tau_negative=2.5), sapo, sapo),
    (make("dppo_tv", max_divergence=0.1, max_importance_ratio=3), dppo_tv, lambda t: t.ratio),
    (
        make("topr"),
        lambda t: min(t.product, 1) if t.advantage < 0 else 1.0,
        lambda t: t.product if t.advantage < 0 else 1.0,
    ),
]
"""A loss, the weight of a token by its formula, and that weight without bounds."""
IDS = [f"{i}-{loss.name}" for i, (loss, _, _) in enumerate(WEIGHTS)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("loss", "weight", "unbounded"), WEIGHTS, ids=IDS)
def test_a_token_weighs_and_is_clipped_as_the_formula_says(
    loss: Loss, weight: Callable[[Token], float], unbounded: Callable[[Token], float], seed: int
) -> None:
    bandit = random_bandit(seed)
    outputs = loss(bandit.tokens())
    tokens = plain(bandit)
    assert outputs.weight.tolist() == pytest.approx([weight(token) for token in tokens], rel=1e-12)
    assert outputs.clipped.tolist() == [weight(token) != unbounded(token) for token in tokens]


@pytest.mark.parametrize(("loss", "weight", "unbounded"), WEIGHTS, ids=IDS)
def test_the_random_cases_have_tokens_on_both_sides_of_every_bound(
    loss: Loss, weight: Callable[[Token], float], unbounded: Callable[[Token], float]
) -> None:
    clipped = [weight(token) != unbounded(token) for seed in SEEDS for token in plain(random_bandit(seed))]
    recomputed = getattr(loss.parameters, "proximal", "") == "recomputed"
    never = loss.name in ("reinforce", "sapo") or (loss.name == "decoupled_ppo" and recomputed)
    assert any(clipped) != never
    assert not all(clipped)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("loss", "weight", "unbounded"), WEIGHTS, ids=IDS)
def test_the_gradient_agrees_with_finite_differences(
    loss: Loss, weight: Callable[[Token], float], unbounded: Callable[[Token], float], seed: int
) -> None:
    bandit = random_bandit(seed)
    weights_N = torch.tensor([weight(token) for token in plain(bandit)], dtype=torch.float64)
    differences = bandit.central_differences(
        lambda logits_NV: -(weights_N * bandit.advantages_N * bandit.logprobs(logits_NV)).sum()
    )
    torch.testing.assert_close(bandit.gradient(loss), differences, rtol=1e-6, atol=1e-8)


def test_interpolated_decoupled_ppo_at_staleness_1_is_ppo_clip() -> None:
    bandit = Bandit((1.1, 0.7, 1.5, 6.0), staleness=(1, 1, 1, 1))
    decoupled_ppo = make("decoupled_ppo", clip_low=0.2, clip_high=0.3, proximal="interpolated")
    ppo_clip = make("ppo_clip", clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(bandit.gradient(decoupled_ppo), bandit.gradient(ppo_clip), rtol=1e-14, atol=0)
