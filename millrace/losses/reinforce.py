"""REINFORCE with a baseline (Williams 1992): the policy gradient of tokens that π itself sampled.

    −∇ loss = A · ∇ log π

Nothing corrects for tokens that an older policy sampled: each weighs 1, however unlikely it has become. With fresh
rollouts it is what the other losses reduce to; with stale ones it shows what their correction is worth.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from millrace.losses.base import Loss, LossTokens, TokenLosses, weighted


@dataclass(frozen=True, kw_only=True)
class Reinforce(Loss):
    """No importance weights."""

    name: ClassVar[str] = "reinforce"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        one_N = torch.ones_like(tokens.rollout_logprobs_N)
        return weighted(tokens, one_N, torch.zeros_like(one_N, dtype=torch.bool))
