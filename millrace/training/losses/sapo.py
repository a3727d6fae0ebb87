"""SAPO: soft adaptive policy optimisation (arXiv 2511.20347).

    loss = −(4/τ) · σ(τ · (r − 1)) · A                     r = π/μ; τ = τ_pos where A > 0, else τ_neg
    −∇ loss = 4 · p · (1 − p) · r · A · ∇ log π            p = σ(τ · (r − 1))

A gate replaces PPO's clipping: a token weighs 1 on policy, and less the further its ratio is from 1 in either
direction. A larger τ closes the gate sooner. The paper's τ is larger where A < 0, because those tokens' gradients
spread over the whole vocabulary. Nothing is ever clipped. The paper takes the mean over responses, each the mean over
its tokens: that is the aggregation `sequence_mean`.
"""

import torch
from torch.nn.functional import logsigmoid

from millrace.training.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, surrogate


class Sapo(Loss):
    """Importance weights behind a soft gate."""

    name = "sapo"

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        own = self.training.losses.sapo
        ratio_N = importance_ratio(tokens)
        tau_N = torch.full_like(ratio_N, own.tau_negative).masked_fill(tokens.advantages_N > 0, own.tau_positive)
        gate_N = tau_N * (ratio_N - 1)
        log_ratio_N = tokens.trainer_logprobs_N.detach() - tokens.rollout_logprobs_N.detach()
        # In logarithms: an infinite ratio behind a closed gate then weighs 0.
        weight_N = 4 * (logsigmoid(gate_N) + logsigmoid(-gate_N) + log_ratio_N).exp()
        never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
        return surrogate(tokens, 4 / tau_N * gate_N.sigmoid(), weight_N, never_N)
