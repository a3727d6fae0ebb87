"""What every policy-gradient loss is: log-probabilities and advantages of tokens in, a surrogate loss a token out.

    −∇ loss = weight · A · ∇ log π        weight: a function of π, of μ, and of the sign of A

π is the policy being trained, μ the behaviour policy that sampled the token, A the advantage of its response. The
losses differ in the weight alone. How the tokens' losses become one number is the aggregation's
(`millrace.losses.aggregation`), whatever the loss.

Shapes: N tokens that carry loss, response after response, each response whole; nothing is padded.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from millrace.errors import TrainingDiverged


@dataclass(frozen=True, kw_only=True)
class LossTokens:
    """The tokens of one microbatch that carry loss."""

    trainer_logprobs_N: torch.Tensor
    """[N] log π, nats, with gradient."""
    rollout_logprobs_N: torch.Tensor
    """[N] log μ, nats."""
    advantages_N: torch.Tensor
    """[N] of the token's response."""
    response_N: torch.Tensor
    """[N] int64, ascending: which of the microbatch's responses the token belongs to, from 0."""
    num_responses: int
    """Of the microbatch; a response may have no token here."""
    staleness_N: torch.Tensor
    """[N] int64: policy versions by which the trainer is ahead of the oldest one that sampled any of the response."""


class TokenLosses(NamedTuple):
    """What a loss says of tokens; all tensors are [N]."""

    loss: torch.Tensor
    """Surrogate loss of each token; its gradient is the one to descend along."""
    weight: torch.Tensor
    """What A · ∇ log π of the token is multiplied with, without gradient."""
    importance_ratio: torch.Tensor
    """π/μ of the token before any clipping, without gradient."""
    clipped: torch.Tensor
    """bool: whether the weight is another than it would be without bounds."""


class Loss(ABC):
    """A policy-gradient loss, with its parameters."""

    name: ClassVar[str]
    """What configs call it."""
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logprobs"})
    """Columns of trajectories that it reads, beside tokens and mask."""

    @abstractmethod
    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """Judge tokens."""


def importance_ratio(tokens: LossTokens) -> torch.Tensor:
    """[N] π/μ of each token, without gradient; infinite where that overflows."""
    return (tokens.trainer_logprobs_N.detach() - tokens.rollout_logprobs_N).exp()


def weighted(tokens: LossTokens, weight_N: torch.Tensor, clipped_N: torch.Tensor) -> TokenLosses:
    """The loss −weight · A · log π: the weight is a number beside the gradient, not part of it. It has to be finite."""
    return TokenLosses(
        loss=-(weight_N * tokens.advantages_N * tokens.trainer_logprobs_N),
        weight=weight_N,
        importance_ratio=importance_ratio(tokens),
        clipped=clipped_N,
    )


def weighted_up_to(bound: float, tokens: LossTokens) -> TokenLosses:
    """Each token weighted by its importance ratio, clipped from above at `bound`."""
    ratio_N = importance_ratio(tokens)
    return weighted(tokens, ratio_N.clamp(max=bound), ratio_N > bound)


def surrogate(
    tokens: LossTokens, objective_N: torch.Tensor, weight_N: torch.Tensor, clipped_N: torch.Tensor
) -> TokenLosses:
    """The loss −objective · A, whose gradient is −weight · A · ∇ log π: of objectives that are functions of a ratio.

    A token without advantage has loss and gradient 0, even where its ratio is infinite. Any other with an infinite
    weight has a gradient that is not finite, which no trainer steps along.
    """
    nothing_N = tokens.advantages_N == 0
    value_N = (objective_N * tokens.advantages_N).masked_fill(nothing_N, 0)
    pull_N = (weight_N * tokens.advantages_N).masked_fill(nothing_N, 0)
    return TokenLosses(
        loss=-value_N - pull_N * (tokens.trainer_logprobs_N - tokens.trainer_logprobs_N.detach()),
        weight=weight_N,
        importance_ratio=importance_ratio(tokens),
        clipped=clipped_N,
    )


def check_finite(tokens: LossTokens) -> None:
    """Raises TrainingDiverged where a log-probability or an advantage is not a finite number."""
    for what, values_N in (
        ("log π of the trained policy", tokens.trainer_logprobs_N),
        ("log μ of the policy that sampled", tokens.rollout_logprobs_N),
        ("the advantage", tokens.advantages_N),
    ):
        finite_N = values_N.detach().isfinite()
        if not bool(finite_N.all()):
            worst = values_N.detach()[~finite_N]
            raise TrainingDiverged(
                f"{what} is {worst[0].item()} at {len(worst)} of {len(values_N)} tokens that carry loss; "
                "expected finite numbers"
            )
