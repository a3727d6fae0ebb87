"""Importance weights, with tokens or whole responses dropped where π and μ are too far apart.

A mask drops where clipping would keep the weight at the bound: a ratio far from 1 suggests that one of the two numbers
is wrong.
"""

import torch

from configs.losses import GeometricMaskConfig, IcePopConfig, SequenceMaskConfig
from millrace.training.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, weighted, weighted_up_to
from millrace.training.losses.responses import log_ratio_means, log_ratio_sums


class IcePop(Loss):
    """IcePop: drops tokens on which trainer and generator disagree too much (Ring-1T, arXiv 2510.18855).

        −∇ loss = π/μ · A · ∇ log π where low ≤ π/μ ≤ high, else 0

    As in `tis`, the source has PPO's clipped objective behind the mask; with one update per batch its ratio is 1.
    """

    name = "icepop"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        ratio_N = importance_ratio(tokens)
        dropped_N = _outside(ratio_N, self.training.losses.icepop)
        return weighted(tokens, ratio_N.masked_fill(dropped_N, 0), dropped_N)


class SequenceMask(Loss):
    """Seq-MIS: masked importance sampling of whole responses.

        −∇ loss = ρ · A · ∇ log π where low ≤ ρ ≤ high, else 0        ρ = Π_t π_t/μ_t over the response

    Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (richardli.xyz/rl-collapse, part 3). The ratio of the whole response is the importance weight without bias. It
    varies more the longer the response, so more of the long ones are dropped.
    """

    name = "sequence_mask"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        ratio_N = log_ratio_sums(tokens).exp()
        dropped_N = _outside(ratio_N, self.training.losses.sequence_mask)
        return weighted(tokens, ratio_N.masked_fill(dropped_N, 0).to(tokens.trainer_logprobs_N), dropped_N)


class SequenceTis(Loss):
    """Seq-TIS: truncated importance sampling of whole responses.

        −∇ loss = min(ρ, C) · A · ∇ log π        ρ = Π_t π_t/μ_t over the response

    Source: that of `SequenceMask`. Where the mask drops a response, this keeps it at the bound.
    """

    name = "sequence_tis"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        bound = self.training.losses.sequence_tis.max_importance_ratio
        ratio_N = log_ratio_sums(tokens).exp()
        return weighted(tokens, ratio_N.clamp(max=bound).to(tokens.trainer_logprobs_N), ratio_N > bound)


class GeometricMask(Loss):
    """Geo-RS with token-level TIS: a mask of responses that does not depend on their length, and truncated weights.

        −∇ loss = min(π/μ, C) · A · ∇ log π where low ≤ (Π_t π_t/μ_t)^(1/L) ≤ high, else 0        L: response tokens

    Source: that of `SequenceMask`. The ratio of a whole response leaves any interval once the response is long enough;
    the geometric mean of its tokens' ratios does not.
    """

    name = "geometric_mask"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        own = self.training.losses.geometric_mask
        dropped_N = _outside(log_ratio_means(tokens).exp(), own)
        return weighted_up_to(own.max_importance_ratio, tokens, dropped_N)


class DppoTv(Loss):
    """DPPO-TV: divergence proximal policy optimisation, by total variation.

        −∇ loss = min(π/μ, C) · A · ∇ log π, or 0 where A > 0 and π − μ > δ, or A < 0 and μ − π > δ

    "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879; its Binary-TV variant. PPO lets go of
    a token by its ratio. For rare tokens that is far from 1 long before the policy has changed much; for common tokens
    it stays close to 1 when the policy has. Here |π − μ| decides: the total variation between the two policies when
    all other tokens count as one. C is the authors' own bound in verl and large: §5.4 finds that a small one hurts.
    """

    name = "dppo_tv"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        own, advantages_N = self.training.losses.dppo_tv, tokens.advantages_N
        moved_N = tokens.trainer_logprobs_N.detach().exp() - tokens.rollout_logprobs_N.detach().exp()
        dropped_N = ((advantages_N > 0) & (moved_N > own.max_divergence)) | (
            (advantages_N < 0) & (moved_N < -own.max_divergence)
        )
        return weighted_up_to(own.max_importance_ratio, tokens, dropped_N)


def _outside(ratio_N: torch.Tensor, bounds: IcePopConfig | SequenceMaskConfig | GeometricMaskConfig) -> torch.Tensor:
    return (ratio_N < bounds.low) | (ratio_N > bounds.high)
