"""SAPO: soft adaptive policy optimisation (arXiv 2511.20347).

    loss = −(4/τ) · σ(τ · (r − 1)) · A                     r = π/μ; τ = τ_pos where A > 0, else τ_neg
    −∇ loss = 4 · p · (1 − p) · r · A · ∇ log π            p = σ(τ · (r − 1))

A gate in place of PPO's clipping: a token weighs 1 on policy and ever less the farther its ratio is from 1, either way.
A larger τ closes the gate sooner; the paper's is larger where A < 0, for those tokens' gradients spread over the whole
vocabulary. Nothing is ever clipped. The paper takes the mean over responses, each the mean over its tokens: that is the
aggregation `sequence_mean`.
"""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch.nn.functional import logsigmoid

from millrace.losses.base import Loss, LossTokens, TokenLosses, importance_ratio, surrogate


@dataclass(frozen=True, kw_only=True)
class Sapo(Loss):
    """Importance weights behind a soft gate."""

    name: ClassVar[str] = "sapo"
    tau_positive: float
    """τ_pos."""
    tau_negative: float
    """τ_neg."""

    def __call__(self, tokens: LossTokens) -> TokenLosses:
        """As every loss."""
        ratio_N = importance_ratio(tokens)
        tau_N = torch.full_like(ratio_N, self.tau_negative).masked_fill(tokens.advantages_N > 0, self.tau_positive)
        gate_N = tau_N * (ratio_N - 1)
        log_ratio_N = tokens.trainer_logprobs_N.detach() - tokens.rollout_logprobs_N
        # In logarithms, for an infinite ratio behind a closed gate weighs 0.
        weight_N = 4 * (logsigmoid(gate_N) + logsigmoid(-gate_N) + log_ratio_N).exp()
        never_N = torch.zeros_like(ratio_N, dtype=torch.bool)
        return surrogate(tokens, 4 / tau_N * gate_N.sigmoid(), weight_N, never_N)
