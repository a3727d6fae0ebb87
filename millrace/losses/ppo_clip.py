"""PPO's clipped objective (arXiv 1707.06347, eq. 7), its two bounds apart as in DAPO (arXiv 2503.14476, §3.1).

    loss = −min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A)        r = π/μ
    −∇ loss = r · A · ∇ log π, or 0 where the token is clipped

A token is clipped once it has moved far enough the way its advantage wants: r > 1 + ε_high with A > 0, or r < 1 − ε_low
with A < 0. Then it lets go. The other way there is no bound: with A < 0 a token weighs its ratio, however large. That
is what the dual clip is for (arXiv 1912.09729): with A < 0 the loss is at most −c · A, c > 1, and a token whose
ratio exceeds c lets go too.

The policy that the ratio is against is μ, which sampled the token. So with stale rollouts many tokens are clipped from
the start: PPO's own old policy is one optimizer step's ancestor, not several versions'.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from millrace.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, surrogate


@dataclass(frozen=True, kw_only=True)
class PpoClip(Loss):
    """Importance weights, and none for tokens that moved far enough."""

    name: ClassVar[str] = "ppo_clip"
    clip_low: float
    """ε_low."""
    clip_high: float
    """ε_high."""
    dual_clip: float | None = None
    """c, greater than 1; None: no bound where A < 0."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        ratio_N = importance_ratio(tokens)
        clipped_N = moved_far_enough(ratio_N, tokens.advantages_N, self.clip_low, self.clip_high)
        objective_N = torch.where(clipped_N, ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high), ratio_N)
        if self.dual_clip is not None:
            too_heavy_N = (tokens.advantages_N < 0) & (ratio_N > self.dual_clip)
            objective_N = objective_N.masked_fill(too_heavy_N, self.dual_clip)
            clipped_N = clipped_N | too_heavy_N
        return surrogate(tokens, objective_N, ratio_N.masked_fill(clipped_N, 0), clipped_N)


def moved_far_enough(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """[N] bool: whether a ratio has left [1 − `clip_low`, 1 + `clip_high`] the way its advantage wants."""
    return ((advantages_N > 0) & (ratio_N > 1 + clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - clip_low))
