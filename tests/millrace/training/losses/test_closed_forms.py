"""Every loss against its formula, written out in plain floats token by token, and against finite differences."""

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from support.training.bandit import Bandit, make, pulls, random_bandit

from millrace.training.losses.base import Loss
from millrace.training.losses.clipped import Gspo, PpoClip
from millrace.training.losses.decoupled_ppo import DecoupledPpo
from millrace.training.losses.masks import DppoTv, GeometricMask, IcePop, SequenceMask, SequenceTis
from millrace.training.losses.reinforce import Reinforce, Topr
from millrace.training.losses.sapo import Sapo
from millrace.training.losses.truncated import Aipo, Cispo, Tis

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
    (make(Aipo, max_importance_ratio=2), lambda t: min(t.ratio, 2), lambda t: t.ratio),
    (make(Reinforce), lambda t: 1.0, lambda t: 1.0),
    (
        make(PpoClip, clip_low=0.2, clip_high=0.3),
        lambda t: 0.0 if released(t.ratio, t.advantage, 0.2, 0.3) else t.ratio,
        lambda t: t.ratio,
    ),
    (make(PpoClip, clip_low=0.2, clip_high=0.3, dual_clip=2), dual_clip, lambda t: t.ratio),
    (make(DecoupledPpo, clip_low=0.2, clip_high=0.3, proximal="recomputed"), lambda t: t.ratio, lambda t: t.ratio),
    (make(DecoupledPpo, clip_low=0.2, clip_high=0.3, proximal="interpolated"), interpolated, lambda t: t.ratio),
    (make(Tis, max_importance_ratio=1.5), lambda t: min(t.ratio, 1.5), lambda t: t.ratio),
    (make(SequenceTis, max_importance_ratio=1.5), lambda t: min(t.product, 1.5), lambda t: t.product),
    (make(IcePop, low=0.5, high=3), lambda t: t.ratio if 0.5 <= t.ratio <= 3 else 0.0, lambda t: t.ratio),
    (make(SequenceMask, low=0.5, high=3), lambda t: t.product if 0.5 <= t.product <= 3 else 0.0, lambda t: t.product),
    (
        make(GeometricMask, low=0.8, high=1.5, max_importance_ratio=2),
        lambda t: min(t.ratio, 2) if 0.8 <= t.mean <= 1.5 else 0.0,
        lambda t: t.ratio,
    ),
    (make(Cispo, clip_high=0.3), lambda t: min(t.ratio, 1.3), lambda t: t.ratio),
    (
        make(Gspo, clip_low=0.1, clip_high=0.2),
        lambda t: 0.0 if released(t.mean, t.advantage, 0.1, 0.2) else t.mean,
        lambda t: t.mean,
    ),
    (make(Sapo, tau_positive=1.5, tau_negative=2.5), sapo, sapo),
    (make(DppoTv, max_divergence=0.1, max_importance_ratio=3), dppo_tv, lambda t: t.ratio),
    (
        make(Topr),
        lambda t: min(t.product, 1) if t.advantage < 0 else 1.0,
        lambda t: t.product if t.advantage < 0 else 1.0,
    ),
]
"""A loss, the weight of a token by its formula, and that weight without bounds."""
IDS = [f"{i}-{loss.name}" for i, (loss, _, _) in enumerate(WEIGHTS)]


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize(("loss", "weight", "unbounded"), WEIGHTS, ids=IDS)
def test_a_token_weighs_what_the_formula_says_and_is_clipped_where_bounds_changed_that(
    loss: Loss, weight: Callable[[Token], float], unbounded: Callable[[Token], float], seed: int
) -> None:
    bandit = random_bandit(seed)
    judged = loss(bandit.tokens())
    tokens = plain(bandit)
    assert judged.weight.tolist() == pytest.approx([weight(token) for token in tokens], rel=1e-12)
    assert judged.clipped.tolist() == [weight(token) != unbounded(token) for token in tokens]


@pytest.mark.parametrize(("loss", "weight", "unbounded"), WEIGHTS, ids=IDS)
def test_the_random_cases_have_tokens_on_both_sides_of_every_bound(
    loss: Loss, weight: Callable[[Token], float], unbounded: Callable[[Token], float]
) -> None:
    clipped = [weight(token) != unbounded(token) for seed in SEEDS for token in plain(random_bandit(seed))]
    never = loss.name in ("reinforce", "sapo") or (
        isinstance(loss, DecoupledPpo) and loss.training.losses.decoupled_ppo.proximal == "recomputed"
    )
    assert any(clipped) != never
    assert not all(clipped)


def means(bandit: Bandit, logits_NV: torch.Tensor) -> torch.Tensor:
    """[N] geometric mean ratio of each token's response."""
    tokens = bandit.tokens(logits_NV)
    log_ratio_N = tokens.trainer_logprobs_N - tokens.rollout_logprobs_N
    return torch.stack([log_ratio_N[tokens.response_N == own].mean().exp() for own in tokens.response_N])


def clipped_objective(ratio_N: torch.Tensor, bandit: Bandit, low: float, high: float) -> torch.Tensor:
    advantages_N = bandit.advantages_N
    return torch.minimum(ratio_N * advantages_N, ratio_N.clamp(1 - low, 1 + high) * advantages_N)


def dual_clipped(bandit: Bandit, logits_NV: torch.Tensor) -> torch.Tensor:
    objective_N = clipped_objective(bandit.ratio(logits_NV), bandit, 0.2, 0.3)
    advantages_N = bandit.advantages_N
    return torch.where(advantages_N < 0, torch.maximum(objective_N, 2 * advantages_N), objective_N)


def decoupled(bandit: Bandit, logits_NV: torch.Tensor) -> torch.Tensor:
    before = bandit.tokens()
    d_N = before.staleness_N.double()
    share_N = torch.where(d_N > 0, 1 / d_N.clamp(min=1), 0.0)
    proximal_N = (1 - share_N) * before.trainer_logprobs_N + share_N * before.rollout_logprobs_N
    ratio_N = (bandit.logprobs(logits_NV) - proximal_N).exp()
    return (proximal_N - before.rollout_logprobs_N).exp() * clipped_objective(ratio_N, bandit, 0.2, 0.3)


def gated(bandit: Bandit, logits_NV: torch.Tensor) -> torch.Tensor:
    advantages_N = bandit.advantages_N
    tau_N = torch.where(advantages_N > 0, 1.5, 2.5).double()
    return 4 / tau_N * torch.sigmoid(tau_N * (bandit.ratio(logits_NV) - 1)) * advantages_N


OBJECTIVES: list[tuple[Loss, Callable[[Bandit, torch.Tensor], torch.Tensor]]] = [
    (
        make(PpoClip, clip_low=0.2, clip_high=0.3),
        lambda bandit, logits_NV: clipped_objective(bandit.ratio(logits_NV), bandit, 0.2, 0.3),
    ),
    (make(PpoClip, clip_low=0.2, clip_high=0.3, dual_clip=2), dual_clipped),
    (make(DecoupledPpo, clip_low=0.2, clip_high=0.3, proximal="interpolated"), decoupled),
    (
        make(Gspo, clip_low=0.1, clip_high=0.2),
        lambda bandit, logits_NV: clipped_objective(means(bandit, logits_NV), bandit, 0.1, 0.2),
    ),
    (make(Sapo, tau_positive=1.5, tau_negative=2.5), gated),
]
"""A loss and the published objective of each token, to be maximised, whose gradient it has."""


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("loss", "objective"), OBJECTIVES, ids=[loss.name for loss, _ in OBJECTIVES])
def test_loss_and_gradient_are_those_of_the_published_objective_by_finite_differences(
    loss: Loss, objective: Callable[[Bandit, torch.Tensor], torch.Tensor], seed: int
) -> None:
    bandit = random_bandit(seed)
    torch.testing.assert_close(loss(bandit.tokens()).loss, -objective(bandit, bandit.logits_NV), rtol=1e-12, atol=1e-14)
    differences = bandit.central_differences(lambda logits_NV: -objective(bandit, logits_NV).sum())
    torch.testing.assert_close(bandit.gradient(loss), differences, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize(("loss", "weight", "unbounded"), WEIGHTS, ids=IDS)
def test_the_gradient_is_that_of_weighted_log_probabilities_by_finite_differences(
    loss: Loss, weight: Callable[[Token], float], unbounded: Callable[[Token], float], seed: int
) -> None:
    bandit = random_bandit(seed)
    weights_N = torch.tensor([weight(token) for token in plain(bandit)], dtype=torch.float64)
    differences = bandit.central_differences(
        lambda logits_NV: -(weights_N * bandit.advantages_N * bandit.logprobs(logits_NV)).sum()
    )
    torch.testing.assert_close(bandit.gradient(loss), differences, rtol=1e-6, atol=1e-8)


def test_the_mean_over_tokens_of_gspos_losses_has_the_gradient_of_the_responses_objective() -> None:
    bandit = Bandit((1.05, 0.97, 1.02), advantages=(0.5, 0.5, 0.5), lengths=(3,))
    gradient_NV = bandit.gradient(make(Gspo, clip_low=0.1, clip_high=0.2)) / 3
    differences = bandit.central_differences(lambda logits_NV: -(means(bandit, logits_NV)[0] * 0.5))
    torch.testing.assert_close(gradient_NV, differences, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("of_responses", "of_tokens"),
    [
        (make(Gspo, clip_low=0.2, clip_high=0.3), make(PpoClip, clip_low=0.2, clip_high=0.3)),
        (make(SequenceMask, low=0.5, high=3), make(IcePop, low=0.5, high=3)),
    ],
    ids=["gspo", "sequence_mask"],
)
def test_responses_of_one_token_are_tokens(of_responses: Loss, of_tokens: Loss) -> None:
    bandit = Bandit((1.1, 0.7, 1.5, 6.0))
    torch.testing.assert_close(
        pulls(of_responses, bandit.tokens()), pulls(of_tokens, bandit.tokens()), rtol=1e-14, atol=0
    )


def test_one_version_behind_the_interpolated_proximal_policy_is_the_one_that_sampled() -> None:
    bandit = Bandit((1.1, 0.7, 1.5, 6.0), staleness=(1, 1, 1, 1))
    decoupled_ppo = make(DecoupledPpo, clip_low=0.2, clip_high=0.3, proximal="interpolated")
    ppo_clip = make(PpoClip, clip_low=0.2, clip_high=0.3)
    torch.testing.assert_close(bandit.gradient(decoupled_ppo), bandit.gradient(ppo_clip), rtol=1e-14, atol=0)
