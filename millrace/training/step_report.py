"""The report of a step, from the values that each rank has of its tokens.

    an update: microbatch ─► [columns, tokens of the batch], 0 except its own tokens ─► summed over ranks ─┐
    a step: all its updates, one after the other ─► the numbers ◄──────────────────────────────────────────┘

Each number is one of the whole batch: the same on every rank, and however the batch was split. A token counts once for
each update that it took part in, with its values in that update.

The numbers are computed on the trainer's device: on the CPU, those of four million tokens would take seconds, and the
GPUs would wait.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from statistics import fmean
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from millrace.rewards.base import component_means
from millrace.rollouts.ledger import Amount
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.base import LossOutputs
from millrace.training.parallel.ranks import Ranks


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The numbers of one step. Means, shares and quantiles are over the trainable tokens, in each update.

    Those of π/μ and of the loss's weights leave demonstrations out, which no policy sampled, unless a step has nothing
    else.
    """

    loss: float
    """Surrogate loss, summed by the aggregation, without KL to the reference, forward KL to the teacher and entropy;
    mean over updates."""
    grad_norm: float
    """Global L2 norm before clipping; mean over updates."""
    learning_rate: float
    """In force, mean over updates."""
    updates: int
    """Optimizer updates on the batch."""
    importance_ratio_mean: float
    """Mean π/μ before clipping."""
    importance_ratio_p05: float
    """Quantiles of π/μ before clipping, each the ratio of a token: 5 % are below this one, half below the next, …"""
    importance_ratio_p50: float
    importance_ratio_p95: float
    importance_ratio_max: float
    clip_fraction: float
    """Share of tokens whose weight the loss bounded."""
    effective_sample_size: float
    """(Σ w)² / (n · Σ w²) of the loss's weights w, in [0, 1]; 0 if all are 0."""
    ratio_effective_sample_size: float
    """The same of the ratios π/μ before the first update and before any clipping; tokens that are not finite aside."""
    weight_mean: float
    """Mean of the loss's weights: 1 on rollouts of the policy itself."""
    weight_max: float
    mismatch_kl: float
    """Mean of log μ − log π before the first update: an estimate of KL(μ‖π), nats."""
    chi_square: float
    """Mean of (π/μ)² less 1: an estimate of χ²(π‖μ), no unit."""
    kl_to_reference: float
    """Mean of the objective's estimate of KL(π‖reference), nats; 0 without a reference."""
    kl_to_teacher: float
    """Mean of log π − log π_T before the first update, over tokens with a teacher: an estimate of KL(π‖π_T), nats; 0
    without a teacher."""
    forward_kl_to_teacher: float
    """Mean of KL(π_T‖π) over the teacher's k likeliest tokens and the others as one, nats; a token without them counts
    as 0."""
    entropy: float
    """Of the trained policy's next token at the rollout's temperature, nats."""
    tokens: int
    """Response trainable tokens of the batch."""
    non_finite_tokens: int
    """Of them, those masked because their loss was not finite; a token counts once for each update."""
    changed_weight_share: float
    """Share of the trained weights that the step changed, in the number format that generators receive."""
    trainer_logprobs: list[npt.NDArray[np.float32]] = field(compare=False)
    """[samples] of [R] log π of each response token before the first update, nats."""
    trainer_entropies: list[npt.NDArray[np.float32]] = field(compare=False)
    """[samples] of [R] entropy of the policy's choice of each response token before the first update, nats."""

    def measured(self) -> dict[str, float]:
        """Every number above, by name."""
        names = (column.name for column in fields(self) if column.name not in ("trainer_logprobs", "trainer_entropies"))
        return {name: getattr(self, name) for name in names}

    def measures(self, groups: Sequence[ScoredGroup], lags: Sequence[int]) -> dict[str, float]:
        """The metrics of the step on `groups`, by name, the same in a campaign and in a replay.

        `lags` are the groups' staleness, policy versions.
        """
        trained = sum((group.amount(group.trained) for group in groups), Amount())
        masked = sum((group.masked_amount() for group in groups), Amount())
        return {
            **group_measures(groups, lags),
            "staleness_max": max(lags),
            "masked_token_share": masked.tokens / trained.tokens,
            **component_means(text for group in groups for text in group.components),
            **self.measured(),
            **self._mismatch_after_update(groups),
        }

    def _mismatch_after_update(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """`mismatch_kl` of the tokens after the first update in their response; empty if there are none.

        With `generation.keep_cache` they were sampled with keys and values of older versions.
        """
        parts = []
        members = [(group, i) for group in groups for i in group.trained]
        for (group, i), logprobs_R in zip(members, self.trainer_logprobs, strict=True):
            if len(group.span_starts[i]) > 1:
                later = slice(group.span_starts[i][1], None)
                parts.append((group.rollout_logprobs[i] - logprobs_R)[later][group.loss_mask[i][later] > 0])
        values = np.concatenate(parts) if parts else np.zeros(0)
        return {"mismatch_kl_after_update": float(values.mean())} if len(values) else {}


def group_measures(groups: Sequence[ScoredGroup], lags: Sequence[int]) -> dict[str, float]:
    """Computes the metrics of a step that need no report, of all its groups or of those of one source."""
    rewards = [reward for group in groups for reward in group.rewards if reward is not None]
    lengths = [len(tokens) for group in groups for tokens in group.response_tokens]
    return {
        "reward_mean": sum(rewards) / len(rewards),
        "staleness_mean": sum(lags) / len(lags),
        "response_length_mean_tokens": sum(lengths) / len(lengths),
        "truncated_share": sum(sum(group.truncated) for group in groups) / len(lengths),
        "response_seconds_mean": float(np.concatenate([group.response_seconds for group in groups]).mean()),
        "score_seconds_mean": float(np.concatenate([group.score_seconds for group in groups]).mean()),
    }


_OF_LOSS = ("loss", "importance_ratio", "weight", "clipped", "kl_to_reference", "non_finite")
_COLUMNS = (*_OF_LOSS, "forward_kl_to_teacher", "entropy", "trainer_logprobs")
_OF_SAMPLED = ("importance_ratio", "weight", "clipped", "log_ratio")


class TokenTable:
    """The measures of an optimizer update: one value per column and response token of a batch, in order of `samples`.

    The trainer fills it microbatch by microbatch, and sets `grad_norm` and `learning_rate`, as in `StepReport`.
    """

    grad_norm = learning_rate = 0.0

    def __init__(self, samples: Sequence[Sample], device: torch.device) -> None:
        self._samples = samples
        num_tokens = sum(len(sample.response_tokens) for sample in samples)
        # The tokens of other ranks are 0 until the ranks are summed.
        self._values_KN = torch.zeros(len(_COLUMNS), num_tokens, dtype=torch.float64, device=device)

    def add(
        self,
        batch: Microbatch,
        logprobs_N: torch.Tensor,
        entropy_N: torch.Tensor,
        forward_kl_N: torch.Tensor | None,
        outputs: LossOutputs,
        scale_L: torch.Tensor,
    ) -> None:
        """Adds a microbatch's values; `scale_L` is [L], the factor of the loss of each trainable token."""
        at_L = batch.in_batch_N[batch.trainable_L]
        columns = [scale_L * outputs.loss, outputs.importance_ratio, outputs.weight, outputs.clipped, outputs.kl]
        if outputs.non_finite is not None:
            columns.append(outputs.non_finite)
        for row, values_L in enumerate(columns):
            assert values_L is not None
            self._values_KN[row, at_L] = values_L.detach().double()
        if forward_kl_N is not None:
            self._values_KN[-3, batch.in_batch_N] = forward_kl_N.detach().double()
        self._values_KN[-2, batch.in_batch_N] = entropy_N.detach().double()
        self._values_KN[-1, batch.in_batch_N] = logprobs_N.detach().double()

    def finish(self, ranks: Ranks, indices: Sequence[int]) -> None:
        """Sums over the ranks, and sets `tokens` and `policy_2N` of an update on the samples at `indices`."""
        ranks.sum(self._values_KN)
        chosen = set(indices)
        masks = [sample.loss_mask * (index in chosen) for index, sample in enumerate(self._samples)]
        trainable_N, device = np.concatenate(masks).astype(bool), self._values_KN.device
        trainable_L = _indices(trainable_N, device)
        values_KL = self._values_KN[:, trainable_L]
        log_ratio_L = values_KL[-1] - _rollout_logprobs(self._samples, device)[trainable_L]
        tokens = {**dict(zip(_COLUMNS, values_KL, strict=True)), "log_ratio": log_ratio_L}
        sampled_N = _sampled_tokens(self._samples)[trainable_N]
        if not sampled_N.all():
            tokens |= {name: tokens[name][_indices(sampled_N, device)] for name in _OF_SAMPLED}
        self.tokens: Mapping[str, torch.Tensor] = tokens
        """Column → [n] float64 values of the update's trainable tokens; `log_ratio` is log π − log μ, nats."""
        self.policy_2N = self._values_KN[-2:].clone()
        """[2, N] entropy and log π of the batch's response tokens in the update, nats; 0 for samples not in it."""
        del self._values_KN


def report(
    samples: Sequence[Sample], updates: Sequence[TokenTable], before_2N: torch.Tensor, *, changed_weight_share: float
) -> StepReport:
    """The numbers of a step on `samples`.

    `before_2N` is [2, N], entropy and log π of all response tokens before the first update, nats.
    """
    columns, device = updates[0].tokens, before_2N.device
    if len(updates) > 1:
        columns = {name: torch.cat([update.tokens[name] for update in updates]) for name in _COLUMNS}
    ratio, weight = columns["importance_ratio"], columns["weight"]
    log_ratio = (before_2N[1] - _rollout_logprobs(samples, device))[_indices(_sampled_tokens(samples), device)]
    names = ("importance_ratio_p05", "importance_ratio_p50", "importance_ratio_p95", "importance_ratio_max")
    numbers = {
        "loss": columns["loss"].sum() / len(updates),
        "importance_ratio_mean": ratio.mean(),
        **dict(zip(names, ratio_quantiles(ratio), strict=True)),
        "clip_fraction": columns["clipped"].mean(),
        "effective_sample_size": effective_sample_size(weight),
        "ratio_effective_sample_size": ratio_effective_sample_size(log_ratio),
        "weight_mean": weight.mean(),
        "weight_max": weight.max(),
        "mismatch_kl": -log_ratio.mean(),
        "chi_square": chi_square(ratio),
        "kl_to_reference": columns["kl_to_reference"].mean(),
        "forward_kl_to_teacher": columns["forward_kl_to_teacher"].mean(),
        "entropy": columns["entropy"].mean(),
        "non_finite_tokens": columns["non_finite"].sum(),
    }
    # One copy of all: the CPU waits for each.
    measured: dict[str, Any] = dict(zip(numbers, torch.stack(list(numbers.values())).tolist(), strict=True))
    ends = np.cumsum([len(sample.response_tokens) for sample in samples])
    per_sample = np.split(before_2N.float().cpu().numpy(), ends[:-1], axis=1)
    logprobs = [values_2R[1] for values_2R in per_sample]
    return StepReport(
        **measured | {"non_finite_tokens": int(measured["non_finite_tokens"])},
        grad_norm=fmean(update.grad_norm for update in updates),
        learning_rate=fmean(update.learning_rate for update in updates),
        updates=len(updates),
        kl_to_teacher=_kl_to_teacher(samples, logprobs),
        tokens=sum(int(np.count_nonzero(sample.loss_mask)) for sample in samples),
        changed_weight_share=changed_weight_share,
        trainer_logprobs=logprobs,
        trainer_entropies=[values_2R[0] for values_2R in per_sample],
    )


def _indices(mask_N: npt.NDArray[np.bool_], device: torch.device) -> torch.Tensor:
    """[n] int64, on `device`: where the mask is set. The mask itself would make a device wait to count them."""
    return torch.from_numpy(mask_N.nonzero()[0]).to(device)


def _rollout_logprobs(samples: Sequence[Sample], device: torch.device) -> torch.Tensor:
    """[N] float64 log μ of all response tokens, nats, on `device`."""
    return torch.from_numpy(np.concatenate([sample.rollout_logprobs for sample in samples])).to(device).double()


def _sampled_tokens(samples: Sequence[Sample]) -> npt.NDArray[np.bool_]:
    """[N] whether a policy sampled each of the trainable tokens; all of them where it sampled none."""
    trainable_N = np.concatenate([sample.loss_mask for sample in samples]).astype(bool)
    shown_N = np.repeat([sample.is_demonstration for sample in samples], [len(sample.loss_mask) for sample in samples])
    sampled_N: npt.NDArray[np.bool_] = trainable_N & ~shown_N
    return sampled_N if sampled_N.any() else trainable_N


def _kl_to_teacher(samples: Sequence[Sample], logprobs: Sequence[npt.NDArray[np.float32]]) -> float:
    differences = [
        (logprobs_R.astype(np.float64) - sample.teacher_logprobs)[sample.loss_mask > 0]
        for sample, logprobs_R in zip(samples, logprobs, strict=True)
        if len(sample.teacher_logprobs)
    ]
    values = np.concatenate(differences) if differences else np.zeros(0)
    return float(values.mean()) if len(values) else 0.0


def ratio_quantiles(importance_ratio_N: torch.Tensor) -> list[torch.Tensor]:
    """The quantiles 0.05, 0.5, 0.95 and 1 of π/μ, each a token's: interpolation between infinite ratios gives NaN."""
    # Not torch.quantile, which refuses more than 2^24 values.
    ascending_N, last = importance_ratio_N.sort().values, len(importance_ratio_N) - 1
    return [ascending_N[int(share * last)] for share in (0.05, 0.5, 0.95, 1)]


def effective_sample_size(weight_N: torch.Tensor) -> torch.Tensor:
    """(Σ w)² / (n · Σ w²) of the weights, in [0, 1]; 0 where all are 0, NaN where one is infinite (Kish 1965)."""
    squares = weight_N.square().sum()
    return (weight_N.sum().square() / (len(weight_N) * squares)).where(squares != 0, 0.0)


def ratio_effective_sample_size(log_ratio_N: torch.Tensor) -> torch.Tensor:
    """The same of the ratios π/μ of N tokens, given their logarithms, without those not finite; 0 if none is left."""
    if not len(log_ratio_N):
        return log_ratio_N.sum()
    finite_N = log_ratio_N.isfinite()
    log_ratio_N = log_ratio_N.where(finite_N, -math.inf)
    # The ESS does not depend on the ratios' scale, and so none of them overflows.
    weight_N = (log_ratio_N - log_ratio_N.amax()).exp()
    share = finite_N.double().mean()
    return (effective_sample_size(weight_N) / share).where(share > 0, 0.0)


def chi_square(importance_ratio_N: torch.Tensor) -> torch.Tensor:
    """Estimate of χ²(π‖μ): the mean of (π/μ)² less 1, on samples of μ; 1/(1 + χ²) is the ESS of a large batch."""
    return importance_ratio_N.square().mean() - 1
