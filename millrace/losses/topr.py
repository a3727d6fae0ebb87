"""TOPR: tapered off-policy REINFORCE (arXiv 2503.14286).

    −∇ loss = A · ∇ log π where A ≥ 0, else min(ρ, 1) · A · ∇ log π        ρ = Π_t π_t/μ_t over the response

Good responses are learnt at full weight, however unlikely they have become: that is how they become likely again. Bad
ones are unlearnt only while the policy would still say them, so that their probability is not driven towards 0 for
ever. The paper's R, with its baseline, is the advantage here.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch

from millrace.losses.base import Loss, LossTokens, TokenLosses, weighted
from millrace.losses.responses import log_ratio_sums


@dataclass(frozen=True, kw_only=True)
class Topr(Loss):
    """No importance weights for good responses; for bad ones the response's ratio, at most 1."""

    name: ClassVar[str] = "topr"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        ratio_N = log_ratio_sums(tokens).exp().to(tokens.rollout_logprobs_N)
        bad_N = tokens.advantages_N < 0
        weight_N = torch.where(bad_N, ratio_N.clamp(max=1), 1)
        return weighted(tokens, weight_N, bad_N & (ratio_N > 1))
