"""What every policy-gradient loss is: log-probabilities and advantages of tokens in, a surrogate loss a token out.

    −∇ loss = weight · A · ∇ log π        weight: a function of the importance ratio π/μ, and of the sign of A

π is the policy being trained, μ the behaviour policy that sampled the token, A the advantage of its response. The
losses differ in the weight alone; the trainer takes the mean over all tokens of the batch, whatever the loss.
"""

from abc import ABC, abstractmethod
from typing import ClassVar, NamedTuple

import torch


class TokenLosses(NamedTuple):
    """What a loss says of tokens; all tensors are of one shape."""

    loss: torch.Tensor
    """Surrogate loss of each token; its gradient is the one to descend along."""
    weight: torch.Tensor
    """What A · ∇ log π of the token is multiplied with, without gradient."""
    importance_ratio: torch.Tensor
    """π/μ before any clipping, without gradient."""
    clipped: torch.Tensor
    """bool: whether the weight is another than it would be without bounds."""


class Loss(ABC):
    """A policy-gradient loss, with its parameters."""

    name: ClassVar[str]
    """What configs call it."""
    needs: ClassVar[frozenset[str]] = frozenset({"rollout_logprobs"})
    """Columns of trajectories that it reads, beside tokens and mask."""

    @abstractmethod
    def __call__(
        self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> TokenLosses:
        """Judge tokens. All three are of one shape, and of any.

        `trainer_logprobs` are log π in nats, with gradient; `rollout_logprobs` are log μ in nats; `advantages` repeat
        their response's value.
        """


def importance_ratio(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
    """π/μ of each token, without gradient; infinite where that overflows."""
    return (trainer_logprobs.detach() - rollout_logprobs).exp()


def weighted_up_to(
    bound: float, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor
) -> TokenLosses:
    """Each token weighted by its importance ratio, clipped from above at `bound` and outside the gradient."""
    ratio = importance_ratio(trainer_logprobs, rollout_logprobs)
    weight = ratio.clamp(max=bound)
    return TokenLosses(
        loss=-(weight * advantages * trainer_logprobs),
        weight=weight,
        importance_ratio=ratio,
        clipped=ratio > bound,
    )
