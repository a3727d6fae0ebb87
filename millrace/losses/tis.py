"""TIS: truncated importance sampling (Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL
Training", fengyao.notion.site/off-policy-rl, 2025; truncation: Ionides 2008).

    −∇ loss = min(π/μ, C) · A · ∇ log π

The source puts min(π_old/μ, C) in front of PPO's clipped objective, whose ratio is π/π_old. Here a batch takes one
optimizer step: π_old is π, that ratio is 1, and what is left is this. The form is AIPO's with ρ = C; what differs is
where the bound comes from.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, weighted_up_to


@dataclass(frozen=True, kw_only=True)
class Tis(Loss):
    """Importance weights, truncated."""

    name: ClassVar[str] = "tis"
    max_importance_ratio: float
    """C."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        return weighted_up_to(self.max_importance_ratio, tokens)
