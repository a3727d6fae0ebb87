"""A mask of whole responses that does not ask how long they are, and truncated weights of tokens in those it keeps.

    −∇ loss = min(π/μ, C) · A · ∇ log π where low ≤ (Π_t π_t/μ_t)^(1/L) ≤ high, else 0        L: tokens of the response

Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
(richardli.xyz/rl-collapse, part 3), there called Geo-RS with token-level TIS: the ratio of a whole response leaves any
interval once the response is long enough; the geometric mean of its tokens' ratios does not.
"""

from dataclasses import dataclass
from typing import ClassVar

from millrace.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, weighted
from millrace.losses.responses import log_ratio_means


@dataclass(frozen=True, kw_only=True)
class GeometricMask(Loss):
    """Truncated importance weights, and no response whose mean ratio is outside an interval."""

    name: ClassVar[str] = "geometric_mask"
    low: float
    """Smallest geometric mean of a response's ratios that is kept."""
    high: float
    """Largest one."""
    max_importance_ratio: float
    """C."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        mean_N = log_ratio_means(tokens).exp()
        dropped_N = (mean_N < self.low) | (mean_N > self.high)
        ratio_N = importance_ratio(tokens)
        weight_N = ratio_N.clamp(max=self.max_importance_ratio).masked_fill(dropped_N, 0)
        return weighted(tokens, weight_N, dropped_N | (ratio_N > self.max_importance_ratio))
