"""How far the policy is from the reference policy: Schulman's estimators of KL(π‖π_ref) from sampled tokens.

    δ = log π − log π_ref               tokens sampled by π, or by a policy close to it

             value            gradient, times ∇ log π     mean over samples of π
    k1       δ                1                           value exact; gradient 0: it holds nothing near anything
    k2       δ² / 2           δ                           value biased; gradient that of KL(π‖π_ref)
    k3       e^(−δ) − 1 + δ   1 − e^(−δ)                  value exact, never negative; gradient that of KL(π_ref‖π)

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020); k3 is GRPO's (arXiv 2402.03300,
eq. 4). As there, the estimate is not weighted by π/μ: on stale rollouts it is off by as much as μ is from π.
"""

import torch

from configs.learning.losses import KlEstimator


def kl_to_reference(
    estimator: KlEstimator, trainer_logprobs_N: torch.Tensor, ref_logprobs_N: torch.Tensor
) -> torch.Tensor:
    """[N] estimate of KL(π‖π_ref) at each token, nats, with its gradient.

    `trainer_logprobs_N` is log π with gradient, `ref_logprobs_N` log π_ref, nats. k3 is infinite where it overflows.
    """
    apart_N = trainer_logprobs_N - ref_logprobs_N.detach()
    if estimator == "k1":
        return apart_N
    if estimator == "k2":
        return apart_N**2 / 2
    return torch.expm1(-apart_N) + apart_N
