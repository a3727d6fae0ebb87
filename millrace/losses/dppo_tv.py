"""DPPO-TV: divergence proximal policy optimisation, by total variation ("Rethinking the Trust Region in LLM
Reinforcement Learning", arXiv 2602.04879; its Binary-TV variant).

    −∇ loss = min(π/μ, C) · A · ∇ log π, or 0 where A > 0 and π − μ > δ, or A < 0 and μ − π > δ

PPO lets go of a token by its ratio, which for rare tokens is far from 1 long before the policy has changed at all, and
for common ones close to 1 when it has changed much. Here |π − μ| decides: the total variation between the two policies
when all other tokens count as one. C is the authors' own bound in verl, large: §5.4 finds that a small one hurts.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, weighted


@dataclass(frozen=True, kw_only=True)
class DppoTv(Loss):
    """Importance weights, and none for tokens whose probability moved far enough."""

    name: ClassVar[str] = "dppo_tv"
    max_divergence: float
    """δ."""
    max_importance_ratio: float
    """C."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        moved_N = tokens.trainer_logprobs_N.detach().exp() - tokens.rollout_logprobs_N.exp()
        advantages_N = tokens.advantages_N
        dropped_N = ((advantages_N > 0) & (moved_N > self.max_divergence)) | (
            (advantages_N < 0) & (moved_N < -self.max_divergence)
        )
        ratio_N = importance_ratio(tokens)
        weight_N = ratio_N.clamp(max=self.max_importance_ratio).masked_fill(dropped_N, 0)
        return weighted(tokens, weight_N, dropped_N | (ratio_N > self.max_importance_ratio))
