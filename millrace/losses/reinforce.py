"""REINFORCE with a baseline (Williams 1992): the policy gradient of tokens that π itself sampled.

    −∇ loss = A · ∇ log π

Nothing corrects for tokens that an older policy sampled: each weighs 1, however unlikely it has become. With fresh
rollouts it is what the other losses reduce to; with stale ones it shows what their correction is worth.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from millrace.losses.base import Loss, TokenLosses, importance_ratio


@dataclass(frozen=True, kw_only=True)
class Reinforce(Loss):
    """No importance weights."""

    name: ClassVar[str] = "reinforce"

    def __call__(
        self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> TokenLosses:
        """As every loss."""
        ratio = importance_ratio(trainer_logprobs, rollout_logprobs)
        return TokenLosses(
            loss=-(advantages * trainer_logprobs),
            weight=torch.ones_like(ratio),
            importance_ratio=ratio,
            clipped=torch.zeros_like(ratio, dtype=torch.bool),
        )
