"""PPO's clipped objective, with one ratio per token or one per response.

    loss = −min(r · A, clip(r, 1 − ε_low, 1 + ε_high) · A)
    −∇ loss = r · A · ∇ log π, or 0 where the token is clipped

A token is clipped once it has moved far enough in the direction of its advantage: r > 1 + ε_high with A > 0, or
r < 1 − ε_low with A < 0. In the other direction there is no bound: with A < 0 a token weighs its ratio, however large.

The ratio is against μ, which sampled the token. PPO's own old policy is at most one batch behind; μ may be several
versions behind. So many tokens of stale rollouts are clipped from the start.
"""

import torch

from millrace.training.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, surrogate
from millrace.training.losses.responses import log_ratio_means


class PpoClip(Loss):
    """PPO (arXiv 1707.06347, eq. 7), r = π/μ, with two separate bounds as in DAPO (arXiv 2503.14476, §3.1).

    The optional dual clip c > 1 bounds the other direction (arXiv 1912.09729): with A < 0 the loss is at most −c · A,
    and a token whose ratio exceeds c is clipped too.
    """

    name = "ppo_clip"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        low, high, dual_clip = self.training.clip_low, self.training.clip_high, self.training.losses.ppo_clip.dual_clip
        return _clipped(tokens, importance_ratio(tokens), low, high, dual_clip)


class Gspo(Loss):
    """GSPO: group sequence policy optimisation (arXiv 2507.18071, eq. 5 and 7; by tokens as in its §4.3).

    r = (Π_t π_t/μ_t)^(1/L) is the geometric mean of the ratios of all L tokens; whole responses are clipped. The paper
    takes the mean over responses, each the mean over its tokens: that is the aggregation `sequence_mean`. With another
    one the weights are the same and long responses count more. The paper's ratio is against the policy before the
    step's minibatches; here it is against μ, so the paper's narrow bounds clip most of a stale batch.
    """

    name = "gspo"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        own = self.training.losses.gspo
        ratio_N = log_ratio_means(tokens).exp().to(tokens.trainer_logprobs_N)
        return _clipped(tokens, ratio_N, own.clip_low, own.clip_high)


def moved_far_enough(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """[N] bool: whether a ratio has left [1 − `clip_low`, 1 + `clip_high`] in the direction of its advantage."""
    return ((advantages_N > 0) & (ratio_N > 1 + clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - clip_low))


def _clipped(
    tokens: LossTokens, ratio_N: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> TokenLosses:
    clipped_N = moved_far_enough(ratio_N, tokens.advantages_N, clip_low, clip_high)
    objective_N = torch.where(clipped_N, ratio_N.clamp(1 - clip_low, 1 + clip_high), ratio_N)
    if dual_clip is not None:
        too_heavy_N = (tokens.advantages_N < 0) & (ratio_N > dual_clip)
        objective_N = objective_N.masked_fill(too_heavy_N, dual_clip)
        clipped_N = clipped_N | too_heavy_N
    return surrogate(tokens, objective_N, ratio_N.masked_fill(clipped_N, 0), clipped_N)
