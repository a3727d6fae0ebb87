"""The forward KL to a teacher over k + 1 outcomes: the teacher's k likeliest tokens, and all other tokens as one.

    KL(π_T‖π) = Σ π_T · (log π_T − log π) over the k, plus R_T · (log R_T − log R)      R_T, R: mass of the other tokens

    d KL / d logit = π − π_T of one of the k
                     π − R_T · π / R of another token: R_T is divided among these in the proportions of π

It is at most the KL over the whole vocabulary, grows with k, and is that KL if k is the size of the vocabulary. It is 0
only if π gives the k tokens the teacher's probabilities. The other usual choice, to renormalise π_T over the k, is
exact in the limit too, but its minimum has no mass on any other token. TRL calls this one `loss_add_tail`.

Shapes: C response tokens of a chunk, V tokens of the vocabulary.
"""

from typing import NamedTuple

import torch

_LARGEST_EXPONENT = 80.0
"""Its exponential is a finite float32."""


class TopTokens(NamedTuple):
    """A teacher's k likeliest tokens per response token, the likeliest first."""

    tokens_NK: torch.Tensor
    """[N, k] int64 token ids; no id twice for one token."""
    logprobs_NK: torch.Tensor
    """[N, k] log π_T of each, nats; the lowest number for a token that truncated sampling could not draw."""

    def to(self, device: torch.device) -> "TopTokens":
        """A copy on `device`."""
        return TopTokens(self.tokens_NK.to(device), self.logprobs_NK.to(device))

    def at(self, part: slice) -> "TopTokens":
        """The top tokens of a slice of the response tokens."""
        return TopTokens(self.tokens_NK[part], self.logprobs_NK[part])


def forward_kl(logits_CV: torch.Tensor, log_sum_C: torch.Tensor, top: TopTokens) -> tuple[torch.Tensor, torch.Tensor]:
    """[C] the KL, nats, and [C] log R: the lowest number if π has no other tokens. Overwrites `logits_CV`.

    π is the softmax of `logits_CV`, and `log_sum_C` is log Σ exp of these.
    """
    log_top_CK = logits_CV.gather(1, top.tokens_NK) - log_sum_C[:, None]
    lowest = torch.finfo(logits_CV.dtype).min
    # 1 − Σ π would round to 0 where the policy is nearly certain.
    log_rest_C = logits_CV.scatter_(1, top.tokens_NK, lowest).logsumexp(dim=-1)
    log_rest_C = torch.where(log_rest_C > lowest / 2, log_rest_C - log_sum_C, lowest)
    shares_CK, rest_C = _teacher_shares(top, log_rest_C)
    kl_C = (shares_CK * (top.logprobs_NK - log_top_CK)).sum(dim=-1) + torch.xlogy(rest_C, rest_C) - rest_C * log_rest_C
    return kl_C, log_rest_C


def add_forward_kl_gradient(
    probs_CV: torch.Tensor, rate_C: torch.Tensor, scale_C: torch.Tensor, log_rest_C: torch.Tensor, top: TopTokens
) -> torch.Tensor:
    """[C, V] `rate_C` · π plus `scale_C` times the KL's gradient for the logits, in place of `probs_CV`, which is π."""
    shares_CK, rest_C = _teacher_shares(top, log_rest_C)
    # Not exactly 1: π_T is rounded.
    total_C = shares_CK.sum(dim=-1) + rest_C
    rest_ratio_C = (rest_C.log() - log_rest_C).clamp(max=_LARGEST_EXPONENT).exp()
    top_grad_CK = probs_CV.gather(1, top.tokens_NK) * (rate_C + scale_C * total_C)[:, None]
    grad_CV = probs_CV.mul_((rate_C + scale_C * (total_C - rest_ratio_C))[:, None])
    return grad_CV.scatter_(1, top.tokens_NK, top_grad_CK - scale_C[:, None] * shares_CK)


def _teacher_shares(top: TopTokens, log_rest_C: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """[C, k] π_T of the top tokens, and [C] R_T: 0 if the policy has no other tokens."""
    shares_CK = top.logprobs_NK.to(log_rest_C).exp()
    rest_C = (1 - shares_CK.sum(dim=-1)).clamp(min=0)
    return shares_CK, rest_C.where(log_rest_C > torch.finfo(log_rest_C.dtype).min / 2, 0)
