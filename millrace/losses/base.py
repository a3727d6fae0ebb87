"""What every policy-gradient loss is: log-probabilities and advantages of tokens in, a surrogate loss a token out.

    −∇ loss = weight · A · ∇ log π        weight: a function of importance ratios π/μ, and of the sign of A

π is the policy being trained, μ the behaviour policy that sampled the token, A the advantage of its response. The
losses differ in the weight alone. How the tokens' losses become one number is the aggregation's
(`millrace.losses.aggregation`), whatever the loss.

Shapes: N tokens that carry loss, response after response, each response whole; nothing is padded.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch


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


def weighted_up_to(bound: float, tokens: LossTokens) -> TokenLosses:
    """Each token weighted by its importance ratio, clipped from above at `bound` and outside the gradient."""
    ratio = importance_ratio(tokens)
    weight = ratio.clamp(max=bound)
    return TokenLosses(
        loss=-(weight * tokens.advantages_N * tokens.trainer_logprobs_N),
        weight=weight,
        importance_ratio=ratio,
        clipped=ratio > bound,
    )
