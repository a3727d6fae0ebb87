"""CISPO: clipped importance-sampling policy optimisation (MiniMax-M1, arXiv 2506.13585).

    −∇ loss = min(π/μ, 1 + ε_high) · A · ∇ log π

As the paper has it, the weight is clipped and not the token: none lets go. Its lower bound is left out, which the paper
too sets so low that it never acts. The form is AIPO's with ρ = 1 + ε_high; what differs is where the bound comes from:
ε_high is the one that `ppo_clip` has. The paper's advantages are also divided by their group's standard deviation; ours
are not.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, weighted_up_to


@dataclass(frozen=True, kw_only=True)
class Cispo(Loss):
    """Importance weights, clipped from above at PPO's bound."""

    name: ClassVar[str] = "cispo"
    clip_high: float
    """ε_high."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        return weighted_up_to(1 + self.clip_high, tokens)
