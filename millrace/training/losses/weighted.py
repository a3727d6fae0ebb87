"""Losses −weight · A · log π: the weight is an importance ratio, bounded from above or masked, or 1.

The bound applies outside the gradient: a token whose ratio exceeds it keeps its gradient, at that weight, where
`-clamp(ratio, max=bound) · A` would have none. A mask drops the tokens that a bound would keep at the bound: a ratio
far from 1 suggests that one of the two numbers is wrong.
"""

import torch

from configs import losses as loss_configs
from millrace.training.losses.base import (
    LossInputs,
    LossOutputs,
    importance_ratio,
    mean_ratio,
    response_ratio,
    weighted,
)


def aipo(inputs: LossInputs, config: loss_configs.AipoConfig) -> LossOutputs:
    """AIPO: asynchronous importance-weighted policy optimization (LlamaRL, arXiv 2505.24034).

    −∇ loss = min(r, ρ_max) · A · ∇ log π
    """
    return _truncated(inputs, config.max_importance_ratio)


def tis(inputs: LossInputs, config: loss_configs.TruncatedConfig) -> LossOutputs:
    """TIS: truncated importance sampling.

    −∇ loss = min(r, C) · A · ∇ log π

    Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy RL Training"
    (fengyao.notion.site/off-policy-rl, 2025); truncation: Ionides 2008. The source puts min(π_old/μ, C) in front of
    PPO's clipped objective, whose ratio is π/π_old. Where a batch takes one update, π_old is π and that ratio is 1;
    with several, nothing here clips their combined change.
    """
    return _truncated(inputs, config.max_importance_ratio)


def cispo(inputs: LossInputs, config: loss_configs.CispoConfig) -> LossOutputs:
    """CISPO: clipped importance-sampling policy optimization (MiniMax-M1, arXiv 2506.13585).

    −∇ loss = min(r, 1 + ε_high) · A · ∇ log π        ε_high: that of `ppo_clip`

    The paper's lower bound, so low that it never acts, is left out. The paper also divides advantages by their group's
    standard deviation; that is the advantage `grpo`.
    """
    return _truncated(inputs, 1 + config.clip_high)


def reinforce(inputs: LossInputs, config: loss_configs.PlainConfig) -> LossOutputs:
    """REINFORCE with a baseline (Williams 1992): the policy gradient of tokens that π itself sampled.

    −∇ loss = A · ∇ log π

    Nothing corrects for tokens that an older policy sampled. On fresh rollouts the other losses reduce to this one; on
    stale ones it shows what their correction is worth.
    """
    weight_N = torch.ones_like(inputs.rollout_logprobs_N)
    return weighted(inputs, weight_N, torch.zeros_like(weight_N, dtype=torch.bool))


def cross_entropy(inputs: LossInputs, config: loss_configs.PlainConfig) -> LossOutputs:
    """Cross-entropy of demonstrations: supervised fine-tuning.

    −∇ loss = ∇ log π

    The advantage has no influence. Demonstrations were not sampled; their log μ is 0, so the reported ratio is the
    probability of the token.
    """
    weight_N = torch.ones_like(inputs.rollout_logprobs_N)
    return LossOutputs(
        loss=-inputs.trainer_logprobs_N,
        weight=weight_N,
        importance_ratio=importance_ratio(inputs),
        clipped=torch.zeros_like(weight_N, dtype=torch.bool),
    )


def topr(inputs: LossInputs, config: loss_configs.PlainConfig) -> LossOutputs:
    """TOPR: tapered off-policy REINFORCE (arXiv 2503.14286).

    −∇ loss = A · ∇ log π where A ≥ 0, else min(ρ, 1) · A · ∇ log π        ρ = Π r over the response

    Good responses are learned at full weight, however unlikely they have become. Bad ones are unlearned only while the
    policy is still likely to produce them. The paper's R, with its baseline, is the advantage here.
    """
    ratio_N = response_ratio(inputs).to(inputs.trainer_logprobs_N)
    is_bad_N = inputs.advantages_N < 0
    return weighted(inputs, torch.where(is_bad_N, ratio_N.clamp(max=1), 1), is_bad_N & (ratio_N > 1))


def sequence_tis(inputs: LossInputs, config: loss_configs.TruncatedConfig) -> LossOutputs:
    """Seq-TIS: truncated importance sampling of whole responses.

    −∇ loss = min(ρ, C) · A · ∇ log π        ρ = Π r over the response

    Source: that of `sequence_mask`. Where the mask drops a response, this keeps it at the bound.
    """
    bound = config.max_importance_ratio
    ratio_N = response_ratio(inputs)
    return weighted(inputs, ratio_N.clamp(max=bound).to(inputs.trainer_logprobs_N), ratio_N > bound)


def sequence_mask(inputs: LossInputs, config: loss_configs.SequenceMaskConfig) -> LossOutputs:
    """Seq-MIS: masked importance sampling of whole responses.

    −∇ loss = ρ · A · ∇ log π where low ≤ ρ ≤ high, else 0        ρ = Π r over the response

    Liu, Li et al., "When Speed Kills Stability: Demystifying RL Collapse from the Training-Inference Mismatch"
    (richardli.xyz/rl-collapse, part 3). The ratio of the whole response is the importance weight without bias. It
    varies more the longer the response, so more of the long ones are dropped.
    """
    ratio_N = response_ratio(inputs)
    dropped_N = _outside(ratio_N, config)
    return weighted(inputs, ratio_N.masked_fill(dropped_N, 0).to(inputs.trainer_logprobs_N), dropped_N)


def geometric_mask(inputs: LossInputs, config: loss_configs.GeometricMaskConfig) -> LossOutputs:
    """Geo-RS with token-level TIS: a mask of responses that does not depend on their length, and truncated weights.

    −∇ loss = min(r, C) · A · ∇ log π where low ≤ s ≤ high, else 0        s = (Π r)^(1/L), L: response tokens

    Source: that of `sequence_mask`. The ratio of a whole response leaves any interval once the response is long enough;
    the geometric mean of its tokens' ratios does not.
    """
    return _truncated(inputs, config.max_importance_ratio, _outside(mean_ratio(inputs), config))


def icepop(inputs: LossInputs, config: loss_configs.IcePopConfig) -> LossOutputs:
    """IcePop: drops tokens on which trainer and generator disagree too much (Ring-1T, arXiv 2510.18855).

    −∇ loss = r · A · ∇ log π where low ≤ r ≤ high, else 0

    As in `tis`, the source has PPO's clipped objective behind the mask; with one update per batch its ratio is 1.
    """
    ratio_N = importance_ratio(inputs)
    dropped_N = _outside(ratio_N, config)
    return weighted(inputs, ratio_N.masked_fill(dropped_N, 0), dropped_N)


def dppo_tv(inputs: LossInputs, config: loss_configs.DppoTvConfig) -> LossOutputs:
    """DPPO-TV: divergence proximal policy optimization, by total variation.

    −∇ loss = min(r, C) · A · ∇ log π, or 0 where A > 0 and π − μ > δ, or A < 0 and μ − π > δ

    "Rethinking the Trust Region in LLM Reinforcement Learning", arXiv 2602.04879; its Binary-TV variant. PPO lets go of
    a token by its ratio. For rare tokens that is far from 1 long before the policy has changed much; for common tokens
    it stays close to 1 when the policy has. Here |π − μ| decides: the total variation between the two policies when
    all other tokens count as a single one. C is the authors' bound in verl; §5.4 finds that a small bound hurts.
    """
    advantages_N = inputs.advantages_N
    moved_N = inputs.trainer_logprobs_N.detach().exp() - inputs.rollout_logprobs_N.detach().exp()
    dropped_N = ((advantages_N > 0) & (moved_N > config.max_divergence)) | (
        (advantages_N < 0) & (moved_N < -config.max_divergence)
    )
    return _truncated(inputs, config.max_importance_ratio, dropped_N)


def _truncated(inputs: LossInputs, bound: float, dropped_N: torch.Tensor | None = None) -> LossOutputs:
    """Weighs each token with r, at most `bound`; a dropped token weighs 0."""
    ratio_N = importance_ratio(inputs)
    weight_N, clipped_N = ratio_N.clamp(max=bound), ratio_N > bound
    if dropped_N is not None:
        weight_N, clipped_N = weight_N.masked_fill(dropped_N, 0), dropped_N | clipped_N
    return weighted(inputs, weight_N, clipped_N)


_Bounds = loss_configs.IcePopConfig | loss_configs.SequenceMaskConfig | loss_configs.GeometricMaskConfig


def _outside(ratio_N: torch.Tensor, bounds: _Bounds) -> torch.Tensor:
    return (ratio_N < bounds.low) | (ratio_N > bounds.high)
