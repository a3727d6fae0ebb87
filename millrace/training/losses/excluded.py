"""Tokens excluded from the loss: responses that `training.masks` drops, and tokens whose loss is not finite.

    least or largest π/μ of a token       a single token is enough: trainer and generator seem to compute differently
    mean of π/μ − 1 − log π/μ             Schulman's k3, an estimate of KL(μ‖π) that is never negative
    mean of log μ − log π, where A < 0    k1, an estimate of the same; what has become unlikely is not pushed further

The first mask is the veto of prime-rl (`sequence_mask_ratio_low`) and verl (`rollout_token_veto_threshold`), the second
verl's `seq_mean_k3`, the third DeepSeek-V3.2's off-policy sequence mask (arXiv 2512.02556) and TRL's
`off_policy_mask_threshold`. All are over the response's trainable tokens.

A token is replaced before the loss is computed, by one on policy and without advantage: 0 times an infinite weight
would be NaN. It stays in the denominators of the batch, which follow from lengths alone, and counts as `clipped`.
"""

from dataclasses import replace

import torch

from configs.losses import MasksConfig
from millrace.errors import TrainingDiverged
from millrace.training.losses.base import (
    LossInputs,
    LossOutputs,
    importance_ratio,
    log_ratios,
    mean_over_responses,
    reduce_responses,
)
from millrace.training.losses.factory import Loss


def masked_responses(masks: MasksConfig, inputs: LossInputs) -> torch.Tensor | None:
    """[N] bool: tokens of the responses that a mask drops; None if no mask is set."""
    log_ratio_N, dropped = log_ratios(inputs), []
    if masks.min_token_ratio is not None:
        dropped.append(reduce_responses("min", log_ratio_N, inputs).exp() < masks.min_token_ratio)
    if masks.max_token_ratio is not None:
        dropped.append(reduce_responses("max", log_ratio_N, inputs).exp() > masks.max_token_ratio)
    if masks.max_kl is not None:
        dropped.append(mean_over_responses(log_ratio_N.expm1() - log_ratio_N, inputs) > masks.max_kl)
    if masks.max_kl_negative is not None:
        k1_N = -mean_over_responses(log_ratio_N, inputs)
        dropped.append((inputs.advantages_N < 0) & (k1_N > masks.max_kl_negative))
    return torch.stack(dropped).any(dim=0) if dropped else None


def compute_without(loss: Loss, inputs: LossInputs, dropped_N: torch.Tensor | None) -> LossOutputs:
    """The loss where the tokens `dropped_N`, [N] bool, have weight, loss and gradient 0; None: none is dropped.

    The ratio of a whole response is that of its other tokens. The importance ratio of a dropped token is reported too,
    if it is finite, else 1.
    """
    if dropped_N is None:
        return loss(inputs)
    outputs = loss(replace_dropped(inputs, dropped_N))
    ratio_N = importance_ratio(inputs)
    return LossOutputs(
        loss=outputs.loss.masked_fill(dropped_N, 0),
        weight=outputs.weight.masked_fill(dropped_N, 0),
        importance_ratio=ratio_N.where(~dropped_N | ratio_N.isfinite(), 1),
        clipped=outputs.clipped | dropped_N,
    )


def replace_dropped(inputs: LossInputs, dropped_N: torch.Tensor) -> LossInputs:
    """The inputs, where dropped tokens have no advantage, no gradient, and a log-probability of 0 everywhere."""

    def kept(values_N: torch.Tensor) -> torch.Tensor:
        # `where` passes no gradient to the values it leaves out.
        return torch.where(dropped_N, 0, values_N)

    before_N, reference_N = inputs.before_logprobs_N, inputs.reference_logprobs_N
    return replace(
        inputs,
        trainer_logprobs_N=kept(inputs.trainer_logprobs_N),
        rollout_logprobs_N=kept(inputs.rollout_logprobs_N),
        before_logprobs_N=None if before_N is None else kept(before_N),
        reference_logprobs_N=None if reference_N is None else kept(reference_N),
        advantages_N=kept(inputs.advantages_N),
    )


@torch.no_grad()
def not_finite(outputs: LossOutputs, kl_N: torch.Tensor, inputs: LossInputs) -> torch.Tensor:
    """[N] bool: where the loss of a token, its weight, its KL or what these are made of is not finite."""
    of_inputs = inputs.trainer_logprobs_N, inputs.rollout_logprobs_N, inputs.advantages_N
    columns = (outputs.loss, outputs.weight, kl_N, *of_inputs)
    return ~torch.stack([values_N.isfinite() for values_N in columns]).all(dim=0)


def check_finite(inputs: LossInputs) -> None:
    """Raises TrainingDiverged where a log-probability or an advantage is not a finite number."""
    columns = {
        "log π of the trained policy": inputs.trainer_logprobs_N.detach(),
        "log μ of the policy that sampled": inputs.rollout_logprobs_N,
        "the advantage": inputs.advantages_N,
    }
    is_finite = [values_N.isfinite().all() for values_N in columns.values()]
    # A GPU is waited for once.
    if bool(torch.stack(is_finite).all()):
        return
    name, values_N = next(column for column, finite in zip(columns.items(), is_finite, strict=True) if not finite)
    bad = values_N[~values_N.isfinite()]
    raise TrainingDiverged(
        f"{name} is {bad[0].item()} at {len(bad)} of {len(values_N)} trainable tokens; expected finite numbers"
    )
