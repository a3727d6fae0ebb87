"""Importance ratios of whole responses, from their tokens' log-ratios.

log Π π/μ = Σ_t (log π_t − log μ_t)        over the tokens of the response that carry loss

Nothing here has a gradient.
"""

from typing import Literal

import torch

from millrace.training.losses.base import LossTokens


def log_ratios(tokens: LossTokens) -> torch.Tensor:
    """[N] float64 log π/μ of each token, nats."""
    return tokens.trainer_logprobs_N.detach().double() - tokens.rollout_logprobs_N.detach().double()


def log_ratio_sums(tokens: LossTokens) -> torch.Tensor:
    """[N] float64 log Π π/μ of each token's response, nats."""
    return over_responses("sum", log_ratios(tokens), tokens)


def log_ratio_means(tokens: LossTokens) -> torch.Tensor:
    """[N] float64 mean of log π/μ in each token's response, nats: log of the geometric mean ratio."""
    return response_means(log_ratios(tokens), tokens)


def response_means(values_N: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """[N] mean of the values in each token's response."""
    return over_responses("sum", values_N, tokens) / _lengths(tokens)[tokens.response_N]


def over_responses(reduce: Literal["sum", "min", "max"], values_N: torch.Tensor, tokens: LossTokens) -> torch.Tensor:
    """[N] sum, least or largest of the values in each token's response."""
    # index_add adds in any order on a GPU, so a replay would not match bit for bit.
    # segment_reduce's checks fail where there are no responses at all, as in a spare rank's dummy batch.
    reduced_Q = torch.segment_reduce(values_N, reduce, lengths=_lengths(tokens), unsafe=True)
    return reduced_Q[tokens.response_N]


def _lengths(tokens: LossTokens) -> torch.Tensor:
    # bincount would make a GPU wait for the highest index.
    lengths_Q = torch.zeros(tokens.num_responses, dtype=torch.int64, device=tokens.response_N.device)
    return lengths_Q.index_add_(0, tokens.response_N, torch.ones_like(tokens.response_N))
