"""PPO's clipped objective (arXiv 1707.06347), its two bounds apart as in DAPO (arXiv 2503.14476).

    loss = −min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A)        r = π/μ
    −∇ loss = r · A · ∇ log π, or 0 where the token is clipped

A token is clipped once it has moved far enough the way its advantage wants: r > 1 + ε_high with A > 0, or r < 1 − ε_low
with A < 0. Then it lets go. The other way there is no bound: with A < 0 a token weighs its ratio, however large.

The policy that the ratio is against is μ, which sampled the token. So with stale rollouts many tokens are clipped from
the start: PPO's own old policy is one optimizer step's ancestor, not several versions'.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from millrace.losses.base import Loss, TokenLosses, importance_ratio


@dataclass(frozen=True, kw_only=True)
class PpoClip(Loss):
    """Importance weights, and none for tokens that moved far enough."""

    name: ClassVar[str] = "ppo_clip"
    clip_low: float
    """ε_low."""
    clip_high: float
    """ε_high."""

    def __call__(
        self, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, advantages: torch.Tensor
    ) -> TokenLosses:
        """As every loss."""
        ratio = importance_ratio(trainer_logprobs, rollout_logprobs)
        lowest, highest = 1 - self.clip_low, 1 + self.clip_high
        clipped = ((advantages > 0) & (ratio > highest)) | ((advantages < 0) & (ratio < lowest))
        with_gradient = (trainer_logprobs - rollout_logprobs).exp()
        return TokenLosses(
            loss=-(torch.where(clipped, ratio.clamp(lowest, highest), with_gradient) * advantages),
            weight=ratio.masked_fill(clipped, 0),
            importance_ratio=ratio,
            clipped=clipped,
        )
