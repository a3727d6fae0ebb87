"""Masked importance sampling of whole responses: those that the two policies disagree about too much teach nothing.

    −∇ loss = ρ · A · ∇ log π where low ≤ ρ ≤ high, else 0        ρ = Π_t π_t/μ_t over the response

Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
(richardli.xyz/rl-collapse, part 3), there called Seq-MIS. The ratio of the whole response is the importance weight
without bias; it grows with the response's length, and so does what is dropped. A mask drops where clipping would keep
the weight at the bound: beyond it there is mostly garbage.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, weighted
from millrace.losses.responses import log_ratio_sums


@dataclass(frozen=True, kw_only=True)
class SequenceMask(Loss):
    """A response's importance ratio as the weight of each of its tokens, and no response outside an interval."""

    name: ClassVar[str] = "sequence_mask"
    low: float
    """Smallest ratio that is kept."""
    high: float
    """Largest ratio that is kept."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        ratio_N = log_ratio_sums(tokens).exp()
        dropped_N = (ratio_N < self.low) | (ratio_N > self.high)
        return weighted(tokens, ratio_N.masked_fill(dropped_N, 0).to(tokens.rollout_logprobs_N), dropped_N)
