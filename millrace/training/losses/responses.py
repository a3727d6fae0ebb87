"""Importance ratios of whole responses: the sum of each response's log-ratios.

log Π π/μ = Σ_t (log π_t − log μ_t)        over the tokens of the response that carry loss
"""

import torch

from millrace.training.losses.base import LossTokens


def log_ratio_sums(tokens: LossTokens) -> torch.Tensor:
    """[N] float64 log Π π/μ of each token's response, nats, without gradient."""
    return _sums(tokens, _lengths(tokens))[tokens.response_N]


def log_ratio_means(tokens: LossTokens) -> torch.Tensor:
    """[N] float64 mean of log π/μ in each token's response, nats, without gradient: log of the geometric mean ratio."""
    lengths_Q = _lengths(tokens)
    return (_sums(tokens, lengths_Q) / lengths_Q)[tokens.response_N]


def _lengths(tokens: LossTokens) -> torch.Tensor:
    # bincount would make a GPU wait for the highest index.
    lengths_Q = torch.zeros(tokens.num_responses, dtype=torch.int64, device=tokens.response_N.device)
    return lengths_Q.index_add_(0, tokens.response_N, torch.ones_like(tokens.response_N))


def _sums(tokens: LossTokens, lengths_Q: torch.Tensor) -> torch.Tensor:
    log_ratio_N = tokens.trainer_logprobs_N.detach().double() - tokens.rollout_logprobs_N.double()
    # index_add adds in any order on a GPU, so a replay would not match bit for bit.
    # segment_reduce's checks fail where there are no responses at all, as in a spare rank's dummy batch.
    return torch.segment_reduce(log_ratio_N, "sum", lengths=lengths_Q, unsafe=True)
