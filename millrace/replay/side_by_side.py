"""Losses beside each other on one batch after another: a trainer as it went, and a copy of it for each loss.

    original ─┬─ weights, optimizer state ─► copy with loss 1 ─► one step ─► gradient, norm, weights, how far it moved
              ├────────────────────────────► copy with loss 2 ─► one step ─► …       cosine between every two gradients
              └─► its own step on the batch ─► the next batch

Without copies of their own the losses start each step from the original's weights: they are asked, and move nothing.
With copies of their own they start there once, and each goes its own way.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from millrace.batch import Microbatch, Sample
from millrace.replay.comparison import COSINE, Row
from millrace.samples import samples_of
from millrace.scored import ScoredGroup
from millrace.trainer import Trainer

_REPORTED = (
    "grad_norm",
    "clip_fraction",
    "effective_sample_size",
    "weight_mean",
    "weight_max",
    "importance_ratio_mean",
    "importance_ratio_max",
    "mismatch_kl",
    "tokens",
)


class SideBySide:
    """Losses beside each other: a trainer as it went, and a copy of it for each loss, which trains with that."""

    def __init__(self, original: Trainer, copies: Sequence[Trainer], *, advantage: str, own_copies: bool) -> None:
        self.original = original
        self._advantage = advantage
        self._copies = copies
        self._own_copies = own_copies
        self._parted = False

    def step(
        self, batch: Sequence[ScoredGroup], compared: Sequence[ScoredGroup]
    ) -> tuple[list[Row], list[npt.NDArray[np.float32]]]:
        """Compares the losses on the groups `compared`, if any; then the original takes its step on `batch`.

        Returns a row a loss, and log π of the tokens of `batch` under the original before its step: [samples] of [R].
        """
        samples = self._samples(compared)
        rows = self._ask(samples) if samples else []
        if rows and not self._own_copies:
            for row, (sums, counts) in zip(rows, token_kl(self.original, self._copies, samples), strict=True):
                row["implied_kl"] = float(sums.sum() / counts.sum())
        report = self.original.step(self._samples(batch))
        if rows and self._own_copies:
            rewards = np.array([group.rewards[i] for group in compared for i in group.verified], dtype=np.float64)
            for row, (sums, counts) in zip(rows, token_kl(self.original, self._copies, samples), strict=True):
                row["drift_kl"] = float(sums.sum() / counts.sum())
                if (rewards >= 0).all() and rewards.any():
                    row["reward_weighted_drift_kl"] = float((rewards @ sums) / (rewards @ counts))
        return rows, report.trainer_logprobs

    def _samples(self, groups: Sequence[ScoredGroup]) -> list[Sample]:
        return samples_of(groups, self._advantage, self.original.policy_version)

    def _ask(self, samples: Sequence[Sample]) -> list[Row]:
        """Lets each copy take its step."""
        reports = []
        for copy in self._copies:
            if not (self._own_copies and self._parted):
                copy.become(self.original)
            reports.append(copy.step(samples))
        self._parted = True
        cosines = gradient_cosines(self._copies)
        return [
            {
                "loss": copy.loss.name,
                "surrogate": report.loss,
                **{name: getattr(report, name) for name in _REPORTED},
                **{f"{COSINE}{other.loss.name}": value for other, value in zip(self._copies, row, strict=True)},
            }
            for copy, report, row in zip(self._copies, reports, cosines, strict=True)
        ]


@torch.no_grad()
def token_kl(
    policy: Trainer, others: Sequence[Trainer], samples: Sequence[Sample]
) -> list[tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]]:
    """Of each of the others: [samples] sum of KL(policy ‖ other) over tokens that carry loss, nats, and their number.

    The KL is over the whole vocabulary, at the rollouts' temperature.
    """
    size = len(samples)
    found = [(np.zeros(size), np.zeros(size)) for _ in others]
    for batch in policy.microbatches(samples):
        logprobs_NV = _logprobs(policy, batch)
        sample_N = np.array(batch.places)[batch.response_N.numpy()]
        carries_N = batch.loss_mask_N.numpy()
        for other, (sums, counts) in zip(others, found, strict=True):
            kl_N = (logprobs_NV.exp() * (logprobs_NV - _logprobs(other, batch))).sum(dim=-1).cpu().numpy()
            sums += np.bincount(sample_N, kl_N * carries_N, minlength=size)
            counts += np.bincount(sample_N, carries_N, minlength=size)
    return found


def _logprobs(trainer: Trainer, batch: Microbatch) -> torch.Tensor:
    """[N, V] float64, normalised anew: what float32 rounds off there would be as large as a small step's KL."""
    return torch.log_softmax(trainer.logprobs_of(batch).double(), dim=-1)


def gradient_cosines(trainers: Sequence[Trainer]) -> list[list[float | None]]:
    """Cosine between the last gradients of every two of them, in [-1, 1]; None where one of them is 0."""
    gradients = [[parameter.grad for parameter in trainer.model.parameters()] for trainer in trainers]
    size = len(trainers)
    dots = np.zeros((size, size))
    for i, j in [*combinations(range(size), 2), *((i, i) for i in range(size))]:
        pairs = zip(gradients[i], gradients[j], strict=True)
        dots[i, j] = dots[j, i] = sum(
            (a.double() * b.double()).sum().item() for a, b in pairs if a is not None and b is not None
        )
    norms = np.sqrt(np.diag(dots))
    return [
        [float(dots[i, j] / (norms[i] * norms[j])) if norms[i] and norms[j] else None for j in range(size)]
        for i in range(size)
    ]
