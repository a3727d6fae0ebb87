"""AIPO: asynchronous importance-weighted policy optimisation (LlamaRL, arXiv 2505.24034).

    −∇ loss = min(π/μ, ρ) · A · ∇ log π

The importance ratio is clipped from above only, and outside the gradient: a token whose ratio exceeds ρ keeps pulling
with weight ρ, where `-clamp(ratio, max=ρ)·A` would let go of it. So no token weighs more than ρ, whatever its ratio.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, weighted_up_to


@dataclass(frozen=True, kw_only=True)
class Aipo(Loss):
    """Importance weights, clipped from above."""

    name: ClassVar[str] = "aipo"
    max_importance_ratio: float
    """ρ."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        return weighted_up_to(self.max_importance_ratio, tokens)
