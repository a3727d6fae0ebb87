"""Masks that any loss may have: responses in which π and μ are too far apart, `training.masks`.

    least or largest π/μ of a token       one token is enough: trainer and generator seem to compute differently
    mean of π/μ − 1 − log π/μ             Schulman's k3, an estimate of KL(μ‖π) that is never negative
    mean of log μ − log π, where A < 0    k1, an estimate of the same; what has become unlikely is not pushed further

The first is the veto of prime-rl (`sequence_mask_ratio_low`) and verl (`rollout_token_veto_threshold`), the second
verl's `seq_mean_k3`, the third DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556) and TRL's
`off_policy_mask_threshold`. All are over the response's tokens that carry loss.
"""

import torch

from configs.losses import MasksConfig
from millrace.training.losses.base import LossTokens
from millrace.training.losses.responses import log_ratio_means, log_ratios, over_responses, response_means


def masked_responses(masks: MasksConfig, tokens: LossTokens) -> torch.Tensor | None:
    """[N] bool: tokens of the responses that a mask drops; None if no mask is set."""
    log_ratio_N, dropped = log_ratios(tokens), []
    if masks.min_token_ratio is not None:
        dropped.append(over_responses("min", log_ratio_N, tokens).exp() < masks.min_token_ratio)
    if masks.max_token_ratio is not None:
        dropped.append(over_responses("max", log_ratio_N, tokens).exp() > masks.max_token_ratio)
    if masks.max_kl is not None:
        dropped.append(response_means(log_ratio_N.expm1() - log_ratio_N, tokens) > masks.max_kl)
    if masks.max_kl_negative is not None:
        dropped.append((tokens.advantages_N < 0) & (-log_ratio_means(tokens) > masks.max_kl_negative))
    return torch.stack(dropped).any(dim=0) if dropped else None
