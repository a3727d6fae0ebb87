"""Losses from an objective of a ratio, which stops pulling, or pulls less, once the policy has moved far enough.

    PPO's objective    loss = −min(x · A, clip(x, 1 − ε_low, 1 + ε_high) · A)        x: a ratio
                       −∇ loss = x · A · ∇ log π, or 0 where the token is clipped

A token is clipped once it has moved far enough in the direction of its advantage: x > 1 + ε_high with A > 0, or
x < 1 − ε_low with A < 0. The other direction is unbounded: with A < 0 a token weighs its ratio, however large.

The ratio is against μ, which sampled the token. PPO's own old policy is at most one batch behind; μ may be several
versions behind. On stale rollouts many tokens are clipped from the start.
"""

import torch
from torch.nn.functional import logsigmoid

from configs.losses import DecoupledPpoConfig, GspoConfig, PpoClipConfig, SapoConfig
from millrace.training.losses.base import LossInputs, LossOutputs, importance_ratio, mean_ratio, surrogate


def ppo_clip(inputs: LossInputs, config: PpoClipConfig) -> LossOutputs:
    """PPO (arXiv 1707.06347, eq. 7) with x = r = π/μ, and two separate bounds as in DAPO (arXiv 2503.14476, §3.1).

    The optional dual clip c > 1 bounds the other direction (arXiv 1912.09729): with A < 0 the loss is at most −c · A,
    and a token whose ratio exceeds c is clipped too.
    """
    return _clipped(inputs, importance_ratio(inputs), config.clip_low, config.clip_high, config.dual_clip)


def gspo(inputs: LossInputs, config: GspoConfig) -> LossOutputs:
    """GSPO: group sequence policy optimization (arXiv 2507.18071, eq. 5 and 7; by tokens as in its §4.3).

    x = s = (Π r)^(1/L), the geometric mean of the ratios of all L tokens; whole responses are clipped. The paper takes
    the mean over responses, each the mean over its tokens: that is the aggregation `sequence_mean`. With another one
    the weights are the same and long responses count more. The paper's ratio is against the policy before the step's
    minibatches; here it is against μ, so the paper's narrow bounds clip most of a stale batch.
    """
    ratio_N = mean_ratio(inputs).to(inputs.trainer_logprobs_N)
    return _clipped(inputs, ratio_N, config.clip_low, config.clip_high)


def decoupled_ppo(inputs: LossInputs, config: DecoupledPpoConfig) -> LossOutputs:
    """Decoupled PPO: clips against a policy close to π, and corrects from there to the policy that sampled.

        loss = −(π_prox/μ) · min(x · A, clip(x, 1 − ε_low, 1 + ε_high) · A)        x = π/π_prox
        −∇ loss = (π/μ) · A · ∇ log π, or 0 where x is clipped

    Hilton et al., arXiv 2110.00641; for asynchronous training of language models AReaL, arXiv 2505.24298, §5.2. The
    proximal policy π_prox is one of

        recomputed      π_prox = π as it was before the batch's first update
        interpolated    log π_prox = log π + (log μ − log π) / d        d: staleness in versions; π_prox = π where d = 0

    `recomputed` is AReaL's. With several updates on a batch it bounds how far they move the policy together, however
    stale the batch is. In the first of them x is 1, nothing is clipped, and a token weighs its full importance ratio.
    `interpolated` is A-3PO (arXiv 2512.06547), which puts π_prox about one version behind the live π. At d = 1 it is μ,
    and the loss is `ppo_clip`. A-3PO's d is the token's; here it counts from the oldest version that sampled any of the
    response. Neither bounds π/μ. AReaL's code drops tokens where it is large; `icepop` does that.
    """
    low, high = config.clip_low, config.clip_high
    trainer_logprobs_N, rollout_logprobs_N = inputs.trainer_logprobs_N.detach(), inputs.rollout_logprobs_N.detach()
    if config.proximal == "interpolated":
        staleness_N = inputs.staleness_N.to(trainer_logprobs_N)
        share_N = torch.where(staleness_N > 0, 1 / staleness_N, 0)
        proximal_logprobs_N = torch.lerp(trainer_logprobs_N, rollout_logprobs_N.to(trainer_logprobs_N), share_N)
    elif inputs.before_logprobs_N is not None:
        proximal_logprobs_N = inputs.before_logprobs_N
    else:
        proximal_logprobs_N = trainer_logprobs_N
    ratio_N = (trainer_logprobs_N - proximal_logprobs_N).exp()
    clipped_N = _moved_far_enough(ratio_N, inputs.advantages_N, low, high)
    # Where nothing is clipped (π_prox/μ) · x is π/μ; computed as a product, either factor could overflow.
    weight_N = importance_ratio(inputs)
    at_bound_N = (proximal_logprobs_N - rollout_logprobs_N).exp() * ratio_N.clamp(1 - low, 1 + high)
    objective_N = torch.where(clipped_N, at_bound_N, weight_N)
    return surrogate(inputs, objective_N, weight_N.masked_fill(clipped_N, 0), clipped_N)


def sapo(inputs: LossInputs, config: SapoConfig) -> LossOutputs:
    """SAPO: soft adaptive policy optimization (arXiv 2511.20347).

        loss = −(4/τ) · σ(τ · (r − 1)) · A                     τ = τ_pos where A > 0, else τ_neg
        −∇ loss = 4 · p · (1 − p) · r · A · ∇ log π            p = σ(τ · (r − 1))

    A gate replaces PPO's clipping: a token weighs 1 on policy, and less the further its ratio is from 1 in either
    direction. A larger τ closes the gate sooner. The paper's τ is larger where A < 0, because those tokens' gradients
    spread over the whole vocabulary. Nothing is ever clipped. The paper takes the mean over responses, each the mean
    over its tokens: that is the aggregation `sequence_mean`.
    """
    ratio_N = importance_ratio(inputs)
    tau_N = torch.full_like(ratio_N, config.tau_negative).masked_fill(inputs.advantages_N > 0, config.tau_positive)
    gate_N = tau_N * (ratio_N - 1)
    log_ratio_N = inputs.trainer_logprobs_N.detach() - inputs.rollout_logprobs_N.detach()
    # In logarithms: an infinite ratio behind a closed gate then weighs 0.
    weight_N = 4 * (logsigmoid(gate_N) + logsigmoid(-gate_N) + log_ratio_N).exp()
    return surrogate(inputs, 4 / tau_N * gate_N.sigmoid(), weight_N, torch.zeros_like(ratio_N, dtype=torch.bool))


def _clipped(
    inputs: LossInputs, ratio_N: torch.Tensor, clip_low: float, clip_high: float, dual_clip: float | None = None
) -> LossOutputs:
    """PPO's clipped objective of `ratio_N`."""
    clipped_N = _moved_far_enough(ratio_N, inputs.advantages_N, clip_low, clip_high)
    objective_N = torch.where(clipped_N, ratio_N.clamp(1 - clip_low, 1 + clip_high), ratio_N)
    if dual_clip is not None:
        too_heavy_N = (inputs.advantages_N < 0) & (ratio_N > dual_clip)
        objective_N = objective_N.masked_fill(too_heavy_N, dual_clip)
        clipped_N = clipped_N | too_heavy_N
    return surrogate(inputs, objective_N, ratio_N.masked_fill(clipped_N, 0), clipped_N)


def _moved_far_enough(
    ratio_N: torch.Tensor, advantages_N: torch.Tensor, clip_low: float, clip_high: float
) -> torch.Tensor:
    """[N] bool: whether a ratio has left [1 − `clip_low`, 1 + `clip_high`] in the direction of its advantage."""
    return ((advantages_N > 0) & (ratio_N > 1 + clip_high)) | ((advantages_N < 0) & (ratio_N < 1 - clip_low))
