"""The interface of a policy-gradient loss: log π, log μ and advantages of tokens in, a surrogate loss per token out.

    −∇ loss = weight · A · ∇ log π        weight: a function of π, of μ, and of the sign of A

π is the policy being trained, μ the behaviour policy that sampled the token, A the advantage of the token's response.
Losses differ only in the weight. `millrace.training.losses.aggregation` turns the tokens' losses into one number.

Shapes: N tokens that carry loss, response after response, each response whole; there is no padding.
"""

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar, NamedTuple

import torch

from configs.training import TrainingConfig
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
    """[N] int64, ascending: index of the token's response in the microbatch, from 0."""
    num_responses: int
    """Responses of the microbatch; a response may have no token here."""
    staleness_N: torch.Tensor
    """[N] int64: policy versions by which the trainer is ahead of the oldest one that sampled any of the response's
    tokens, without those too old to carry loss."""
    before_logprobs_N: torch.Tensor | None = None
    """[N] log π before the first update on the batch, nats, without gradient; None if this is the first."""


class TokenLosses(NamedTuple):
    """What a loss returns; all tensors are [N]."""

    loss: torch.Tensor
    """Surrogate loss of each token; its gradient is the one to descend."""
    weight: torch.Tensor
    """Factor of the token's A · ∇ log π, without gradient."""
    importance_ratio: torch.Tensor
    """π/μ of the token before any clipping, without gradient."""
    clipped: torch.Tensor
    """bool: whether a bound changed the weight."""


class Loss(ABC):
    """A policy-gradient loss. It reads its parameters from `training`."""

    name: str
    """The loss's name in configs."""
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logprobs"})
    """Columns of trajectories that it reads, besides tokens and mask."""
    needs_advantage: bool = True
    """Whether a token without advantage has no gradient, so that a backward pass is spared."""

    def __init__(self, training: TrainingConfig) -> None:
        self.training = training

    @abstractmethod
    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """Compute loss and weight of each token."""


def importance_ratio(tokens: LossTokens) -> torch.Tensor:
    """[N] π/μ of each token, without gradient; infinite where it overflows."""
    return (tokens.trainer_logprobs_N.detach() - tokens.rollout_logprobs_N.detach()).exp()


def weighted(tokens: LossTokens, weight_N: torch.Tensor, clipped_N: torch.Tensor) -> TokenLosses:
    """The loss −weight · A · log π. No gradient flows through the weight, which has to be finite."""
    return TokenLosses(
        loss=-(weight_N * tokens.advantages_N * tokens.trainer_logprobs_N),
        weight=weight_N,
        importance_ratio=importance_ratio(tokens),
        clipped=clipped_N,
    )


def weighted_up_to(bound: float, tokens: LossTokens, dropped_N: torch.Tensor | None = None) -> TokenLosses:
    """Weights each token by its importance ratio, clipped from above at `bound`; a dropped token weighs 0."""
    ratio_N = importance_ratio(tokens)
    weight_N, clipped_N = ratio_N.clamp(max=bound), ratio_N > bound
    if dropped_N is not None:
        weight_N, clipped_N = weight_N.masked_fill(dropped_N, 0), dropped_N | clipped_N
    return weighted(tokens, weight_N, clipped_N)


def surrogate(
    tokens: LossTokens, objective_N: torch.Tensor, weight_N: torch.Tensor, clipped_N: torch.Tensor
) -> TokenLosses:
    """The loss −objective · A with gradient −weight · A · ∇ log π, for objectives that are functions of a ratio.

    A token without advantage has loss and gradient 0, even where its ratio is infinite. One without weight has a finite
    loss too: where its objective overflows, the largest number stands for it. Any other token with an infinite weight
    has a gradient that is not finite; the trainer refuses to step along it.
    """
    nothing_N = tokens.advantages_N == 0
    value_N = (objective_N * tokens.advantages_N).masked_fill(nothing_N, 0)
    largest = torch.finfo(value_N.dtype).max
    value_N = torch.where(weight_N == 0, value_N.clamp(-largest, largest), value_N)
    pull_N = (weight_N * tokens.advantages_N).masked_fill(nothing_N, 0)
    return TokenLosses(
        loss=-value_N - pull_N * (tokens.trainer_logprobs_N - tokens.trainer_logprobs_N.detach()),
        weight=weight_N,
        importance_ratio=importance_ratio(tokens),
        clipped=clipped_N,
    )


def check_finite(tokens: LossTokens) -> None:
    """Raises TrainingDiverged where a log-probability or an advantage is not a finite number."""
    columns = {
        "log π of the trained policy": tokens.trainer_logprobs_N.detach(),
        "log μ of the policy that sampled": tokens.rollout_logprobs_N,
        "the advantage": tokens.advantages_N,
    }
    finite = [values_N.isfinite().all() for values_N in columns.values()]
    # A GPU is waited for once.
    if bool(torch.stack(finite).all()):
        return
    what, values_N = next(column for column, fine in zip(columns.items(), finite, strict=True) if not fine)
    worst = values_N[~values_N.isfinite()]
    raise TrainingDiverged(
        f"{what} is {worst[0].item()} at {len(worst)} of {len(values_N)} tokens that carry loss; "
        "expected finite numbers"
    )
