"""Losses beside each other on one batch after another: the original trainer, and a copy of it per loss.

    original ─┬─ weights, optimizer state ─► copy with loss 1 ─► one step ─► gradient, norm, weights, KL of the step
              ├────────────────────────────► copy with loss 2 ─► one step ─► …       cosine between each two gradients
              └─► its own step on the batch ─► the next batch

Every copy starts each step from the original's weights.
"""

from collections.abc import Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import torch

from configs.training import SelectionConfig
from millrace.replay.comparison import COSINE, Row
from millrace.rollouts.scored_group import ScoredGroup
from millrace.selection.truncation import mask_truncated
from millrace.training.batch import Microbatch, Sample
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer

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
    """`original` repeats its steps; each of `copies`, with a loss of its own, is compared at its weights.

    `advantage` and `selection` are those of the run.
    """

    def __init__(
        self, original: Trainer, copies: Sequence[Trainer], *, advantage: str, selection: SelectionConfig
    ) -> None:
        self.original = original
        self._copies = copies
        self._advantage = advantage
        self._selection = selection

    def step(
        self, batch: Sequence[ScoredGroup], compared: Sequence[ScoredGroup]
    ) -> tuple[list[Row], list[npt.NDArray[np.float32]]]:
        """Compares the losses on the groups `compared`, if any; then the original takes its step on `batch`.

        Returns a row per loss, and log π of the tokens of `batch` under the original before its step: [samples] of [R].
        """
        samples = self._samples(compared)
        rows = self._compare(samples) if samples else []
        return rows, self.original.step(self._samples(batch)).trainer_logprobs

    def _samples(self, groups: Sequence[ScoredGroup]) -> list[Sample]:
        masked = [mask_truncated(group, self._selection) for group in groups]
        return samples_of(masked, self._advantage, self.original.policy_version, self._selection)

    def _compare(self, samples: Sequence[Sample]) -> list[Row]:
        reports = []
        for copy in self._copies:
            copy.become(self.original)
            reports.append(copy.step(samples))
        return [
            {
                "loss": copy.loss.name,
                "surrogate": report.loss,
                **{name: getattr(report, name) for name in _REPORTED},
                **{f"{COSINE}{other.loss.name}": value for other, value in zip(self._copies, cosines, strict=True)},
                "implied_kl": kl,
            }
            for copy, report, cosines, kl in zip(
                self._copies,
                reports,
                gradient_cosines(self._copies),
                mean_token_kl(self.original, self._copies, samples),
                strict=True,
            )
        ]


@torch.no_grad()
def mean_token_kl(policy: Trainer, others: Sequence[Trainer], samples: Sequence[Sample]) -> list[float]:
    """For each of the others: mean of KL(policy ‖ other) over tokens that carry loss, nats.

    The KL is over the whole vocabulary, at the trajectories' temperature.
    """
    size = len(samples)
    found = [(np.zeros(size), np.zeros(size)) for _ in others]
    for batch in policy.microbatches(samples):
        logprobs_NV = _logprobs(policy, batch)
        sample_N = np.array(batch.places)[batch.response_N.numpy()]
        carries_N = np.zeros(len(sample_N))
        carries_N[batch.carries_L.numpy()] = 1
        for other, (sums, counts) in zip(others, found, strict=True):
            kl_N = (logprobs_NV.exp() * (logprobs_NV - _logprobs(other, batch))).sum(dim=-1).cpu().numpy()
            sums += np.bincount(sample_N, kl_N * carries_N, minlength=size)
            counts += np.bincount(sample_N, carries_N, minlength=size)
    return [float(sums.sum() / counts.sum()) for sums, counts in found]


def _logprobs(trainer: Trainer, batch: Microbatch) -> torch.Tensor:
    """[N, V] float64, normalised again: float32 rounding would be as large as a small step's KL."""
    return torch.log_softmax(trainer.logprobs_of(batch).double(), dim=-1)


def gradient_cosines(trainers: Sequence[Trainer]) -> list[list[float | None]]:
    """[trainers, trainers] cosine between their last gradients, in [-1, 1]; None where one of them is 0."""
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
