"""How far the policy is from the reference policy: Schulman's estimators of KL(π‖π_ref) from sampled tokens.

    δ = log π − log π_ref               tokens sampled by π, or by a policy close to it

             value            gradient, times ∇ log π     mean over samples of π
    k1       δ                1                           value exact; gradient 0: it holds nothing near anything
    k2       δ² / 2           δ                           value biased; gradient that of KL(π‖π_ref)
    k3       e^(−δ) − 1 + δ   1 − e^(−δ)                  value exact, never negative; gradient that of KL(π_ref‖π)

J. Schulman, "Approximating KL Divergence" (joschu.net/blog/kl-approx.html, 2020); k3 is GRPO's (arXiv 2402.03300,
eq. 4). As there, the estimate is not weighted by π/μ: on stale rollouts it is off by as much as μ is from π. Two
options change that, with r = π/μ and k one of the above:

                                           value    gradient, times ∇ log π
    straight_through                       k        δ: that of KL(π‖π_ref), on samples of π
    importance_weighted                    r · k    r · (k + its own factor above): that of the mean value, on samples
                                                    of μ too
    both                                   r · k    r · δ: that of KL(π‖π_ref), on samples of μ too

The first is verl's `k1+`, `k3+`; the second DeepSeek-V3.2's (arXiv 2512.02556) and TRL's `use_bias_correction_kl`.
"""

import torch

from configs.losses import KlConfig, KlEstimator
from millrace.training.losses.base import LossTokens


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


def kl_penalty(kl: KlConfig, tokens: LossTokens, ref_logprobs_N: torch.Tensor) -> torch.Tensor:
    """[N] what a coefficient of 1 adds to each token's loss, nats, with its gradient.

    `ref_logprobs_N` is log π_ref, nats. It is infinite where an estimate or a ratio overflows.
    """
    found_N = kl_to_reference(kl.estimator, tokens.trainer_logprobs_N, ref_logprobs_N)
    if kl.straight_through:
        apart_N = tokens.trainer_logprobs_N - ref_logprobs_N.detach()
        found_N = found_N.detach() + apart_N.detach() * (apart_N - apart_N.detach())
    if kl.importance_weighted:
        ratio_N = (tokens.trainer_logprobs_N - tokens.rollout_logprobs_N.detach()).exp()
        found_N = (ratio_N.detach() if kl.straight_through else ratio_N) * found_N
    return found_N
