"""GSPO: group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7; by tokens as in its §4.3).

    loss = −min(s · A, clip(s, 1 − ε_low, 1 + ε_high) · A)        s = (Π_t π_t/μ_t)^(1/L), the same for all L tokens
    −∇ loss = s · A · ∇ log π, or 0 where the response is clipped

PPO's objective with one ratio a response, the geometric mean of its tokens'; whole responses are clipped. The paper
takes the mean over responses, each the mean over its tokens: that is the aggregation `sequence_mean`. With another one
the weights are the same and long responses count more. Its ratio is against the policy before the step's minibatches;
here it is against μ, so the paper's narrow bounds clip most of a stale batch.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from millrace.losses.base import Loss, LossTokens, TokenLosses, surrogate
from millrace.losses.ppo_clip import moved_far_enough
from millrace.losses.responses import log_ratio_means


@dataclass(frozen=True, kw_only=True)
class Gspo(Loss):
    """A response's mean ratio as the weight of each of its tokens, and none for responses that moved far enough."""

    name: ClassVar[str] = "gspo"
    clip_low: float
    """ε_low."""
    clip_high: float
    """ε_high."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        ratio_N = log_ratio_means(tokens).exp().to(tokens.rollout_logprobs_N)
        clipped_N = moved_far_enough(ratio_N, tokens.advantages_N, self.clip_low, self.clip_high)
        objective_N = torch.where(clipped_N, ratio_N.clamp(1 - self.clip_low, 1 + self.clip_high), ratio_N)
        return surrogate(tokens, objective_N, ratio_N.masked_fill(clipped_N, 0), clipped_N)
