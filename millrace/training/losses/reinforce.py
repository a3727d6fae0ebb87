"""REINFORCE: no importance weights, or only for bad responses."""

import torch

from millrace.training.losses.base import Loss, LossTokens, TokenLosses, weighted
from millrace.training.losses.responses import log_ratio_sums


class Reinforce(Loss):
    """REINFORCE with a baseline (Williams 1992): the policy gradient of tokens that π itself sampled.

        −∇ loss = A · ∇ log π

    Nothing corrects for tokens that an older policy sampled: each weighs 1, however unlikely it has become. On fresh
    rollouts the other losses reduce to this one; on stale ones it shows what their correction is worth.
    """

    name = "reinforce"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        one_N = torch.ones_like(tokens.rollout_logprobs_N)
        return weighted(tokens, one_N, torch.zeros_like(one_N, dtype=torch.bool))


class Topr(Loss):
    """TOPR: tapered off-policy REINFORCE (arXiv 2503.14286).

        −∇ loss = A · ∇ log π where A ≥ 0, else min(ρ, 1) · A · ∇ log π        ρ = Π_t π_t/μ_t over the response

    Good responses are learnt at full weight, however unlikely they have become: that is how they become likely again.
    Bad ones are unlearnt only while the policy is still likely to produce them, so that their probability is not driven
    towards 0 for ever. The paper's R, with its baseline, is the advantage here.
    """

    name = "topr"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        ratio_N = log_ratio_sums(tokens).exp().to(tokens.trainer_logprobs_N)
        bad_N = tokens.advantages_N < 0
        weight_N = torch.where(bad_N, ratio_N.clamp(max=1), 1)
        return weighted(tokens, weight_N, bad_N & (ratio_N > 1))
