"""How far trajectories are from the policy that is trained on them.

All functions take [N] float64 values of the tokens that carry loss, N at least 1.
"""

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Values = npt.NDArray[np.float64]


class RatioQuantiles(NamedTuple):
    """Quantiles of the importance ratios π/μ: 5 % of the tokens are below the first, half below the second, …"""

    p05: float
    p50: float
    p95: float
    max: float


def ratio_quantiles(importance_ratio_N: Values) -> RatioQuantiles:
    """Quantiles of π/μ. Each is the ratio of a token: interpolating between two infinite ratios gives NaN."""
    return RatioQuantiles(*np.quantile(importance_ratio_N, (0.05, 0.5, 0.95, 1), method="lower").tolist())


def clip_fraction(clipped_N: Values) -> float:
    """Share of tokens whose weight the loss bounded, in [0, 1]; `clipped_N` is 1 for those and 0 for the others."""
    return float(clipped_N.mean())


def effective_sample_size(weight_N: Values) -> float:
    """(Σ w)² / (n · Σ w²) of the loss's weights, in [0, 1]: 1 where all are equal, 0 where all are 0.

    Kish 1965, as a share of the sample. NaN where a weight is infinite.
    """
    squares = np.square(weight_N).sum()
    return float(np.square(weight_N.sum()) / (weight_N.size * squares)) if squares else 0.0


def chi_square(importance_ratio_N: Values) -> float:
    """Estimate of χ²(π‖μ) by tokens: the mean of (π/μ)² less 1, on samples of μ; noise may take it below 0.

    It grows with the variance of importance weights: 1/(1 + χ²) is the effective sample size of a large batch.
    """
    return float(np.square(importance_ratio_N).mean() - 1)


def mismatch_kl(trainer_logprobs_N: Values, rollout_logprobs_N: Values) -> float:
    """Estimate of KL(μ‖π) by tokens, nats: the mean of log μ − log π, on samples of μ; noise may take it below 0."""
    return float((rollout_logprobs_N - trainer_logprobs_N).mean())
