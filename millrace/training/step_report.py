"""The report of an optimizer step, from the values that each rank has of its own tokens.

    microbatch ─► [columns, tokens of the batch], 0 except its own tokens ─► summed over ranks ─► the numbers

Each number is one of the whole batch: the same on every rank, and however the batch was split.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import numpy.typing as npt
import torch

from millrace.rollouts.ledger import Amount
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.base import TokenLosses
from millrace.training.losses.offpolicy import (
    chi_square,
    clip_fraction,
    effective_sample_size,
    mismatch_kl,
    ratio_quantiles,
)
from millrace.training.policy import TokenLogprobs


@dataclass(frozen=True, kw_only=True)
class StepReport:
    """The numbers of one optimizer step. Means are over the tokens that carry loss."""

    loss: float
    """Surrogate loss, summed by the aggregation, without the KL to the reference."""
    grad_norm: float
    """Global L2 norm before clipping."""
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
    weight_mean: float
    """Mean of the loss's weights: 1 on rollouts of the policy itself."""
    weight_max: float
    mismatch_kl: float
    """Mean of log μ − log π over sampled tokens: an estimate of KL(μ‖π), nats."""
    chi_square: float
    """Mean of (π/μ)² less 1: an estimate of χ²(π‖μ), no unit."""
    kl_to_reference: float
    """Mean of the objective's estimate of KL(π‖reference), nats; 0 if there is no reference."""
    entropy: float
    """Of the trained policy's next token at the rollout's temperature, nats."""
    tokens: int
    """Response tokens that carried loss."""
    trainer_logprobs: list[npt.NDArray[np.float32]] = field(compare=False)
    """[samples] of [R] log π of each response token before the step, nats."""

    def measured(self) -> dict[str, float]:
        """Every number above, by name."""
        names = (one.name for one in fields(self) if one.name != "trainer_logprobs")
        return {name: getattr(self, name) for name in names}

    def measures(self, groups: Sequence[ScoredGroup], lags: Sequence[int]) -> dict[str, float]:
        """The metrics of the step on `groups`, by name, the same in a campaign and in a replay.

        `lags` are the groups' staleness, policy versions. Rewards are those of the verified members.
        """
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        lengths = [len(tokens) for group in groups for tokens in group.response_tokens]
        trained = sum((group.amount(group.trained) for group in groups), Amount())
        masked = sum((group.masked_amount() for group in groups), Amount())
        return {
            "reward_mean": sum(rewards) / len(rewards),
            "staleness_mean": sum(lags) / len(lags),
            "staleness_max": max(lags),
            "masked_token_share": masked.tokens / trained.tokens,
            "response_length_mean_tokens": sum(lengths) / len(lengths),
            **self.measured(),
        }


_COLUMNS = ("loss", "importance_ratio", "weight", "clipped", "kl_to_reference", "entropy", "trainer_logprobs")


class TokenTable:
    """One value per column and response token of a batch, in the order of `samples`."""

    def __init__(self, samples: Sequence[Sample], device: torch.device) -> None:
        self._samples = samples
        num_tokens = sum(len(sample.response_tokens) for sample in samples)
        self.values_KN = torch.zeros(len(_COLUMNS), num_tokens, dtype=torch.float64, device=device)
        """[columns, N] float64; the tokens of other ranks are 0 until the ranks are summed."""

    def enter(
        self,
        batch: Microbatch,
        found: TokenLogprobs,
        losses: TokenLosses,
        scaled_loss_L: torch.Tensor,
        kl_L: torch.Tensor,
    ) -> None:
        """Adds a microbatch's values; all but `found` belong to its L tokens that carry loss."""
        at_L = batch.in_batch_N[batch.loss_mask_N]
        of_loss = (scaled_loss_L, losses.importance_ratio, losses.weight, losses.clipped, kl_L)
        for row, values_L in enumerate(of_loss):
            self.values_KN[row, at_L] = values_L.detach().double()
        self.values_KN[-2, batch.in_batch_N] = found.entropy_N.double()
        self.values_KN[-1, batch.in_batch_N] = found.logprobs_N.detach().double()

    def report(self, grad_norm: float) -> StepReport:
        """The numbers, once the values are summed over all ranks."""
        values_KN = self.values_KN.cpu().numpy()
        carries_N = np.concatenate([sample.loss_mask for sample in self._samples]).astype(bool)
        rollout_N = np.concatenate([sample.rollout_logprobs for sample in self._samples]).astype(np.float64)
        of = dict(zip(_COLUMNS, values_KN[:, carries_N], strict=True))
        ratio, weight = of["importance_ratio"], of["weight"]
        quantiles = ratio_quantiles(ratio)
        ends = np.cumsum([len(sample.response_tokens) for sample in self._samples])
        return StepReport(
            loss=float(of["loss"].sum()),
            grad_norm=grad_norm,
            importance_ratio_mean=float(ratio.mean()),
            importance_ratio_p05=quantiles.p05,
            importance_ratio_p50=quantiles.p50,
            importance_ratio_p95=quantiles.p95,
            importance_ratio_max=quantiles.max,
            clip_fraction=clip_fraction(of["clipped"]),
            effective_sample_size=effective_sample_size(weight),
            weight_mean=float(weight.mean()),
            weight_max=float(weight.max()),
            mismatch_kl=mismatch_kl(of["trainer_logprobs"], rollout_N[carries_N]),
            chi_square=chi_square(ratio),
            kl_to_reference=float(of["kl_to_reference"].mean()),
            entropy=float(of["entropy"].mean()),
            tokens=int(carries_N.sum()),
            trainer_logprobs=np.split(values_KN[-1].astype(np.float32), ends[:-1]),
        )
