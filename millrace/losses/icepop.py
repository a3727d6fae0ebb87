"""IcePop: tokens on which trainer and generator disagree too much teach nothing (Ring-1T, arXiv 2510.18855).

    −∇ loss = π/μ · A · ∇ log π where α ≤ π/μ ≤ β, else 0

Masked from both sides, and dropped instead of clipped: a ratio far off 1 says that one of the two numbers is wrong. As
in `tis`, the source has PPO's clipped objective behind the mask, whose ratio is 1 with one optimizer step a batch.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, weighted


@dataclass(frozen=True, kw_only=True)
class IcePop(Loss):
    """Importance weights inside an interval, and none outside."""

    name: ClassVar[str] = "icepop"
    low: float
    """α."""
    high: float
    """β."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        ratio_N = importance_ratio(tokens)
        dropped_N = (ratio_N < self.low) | (ratio_N > self.high)
        return weighted(tokens, ratio_N.masked_fill(dropped_N, 0), dropped_N)
