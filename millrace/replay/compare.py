"""Compares several losses on the batches of a stored run; nothing that is trained here is kept.

run ─► whole batch of step k ─► original: the run's own trainer repeats its steps
                                 ├─► log π of each token, compared with the stored values
       selected groups ─────────►└─ weights, optimizer state ─► copy with loss 1 ─► one step ─┐
                                                             ├► copy with loss 2 ─► one step ─┴► a row per loss:
                                                             └► …       gradient, cosines, KL of the step

Every copy starts each step from the original's weights.
"""

from collections.abc import Callable, Sequence
from itertools import combinations_with_replacement

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from configs.requests import Selection
from millrace.errors import ReplayError
from millrace.replay.results import COSINE, REPORTED, Row, comparison_schema
from millrace.replay.selection import select
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import start_trainer
from millrace.rollouts.masking import mask_truncated
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runtime.arguments import attempt_config
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.factory import make_loss
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer


def compare(
    run: SourceRun,
    losses: Sequence[str],
    *,
    selection: Selection,
    each: Callable[[list[Row]], None] = lambda rows: None,
    on_progress: Callable[[], None] = lambda: None,
) -> pa.Table:
    """Computes each of `losses`, with the parameters of the run's config, on the selected groups of each step.

    Returns a row per step and loss, in this order, with the columns of `comparison_schema`. `each` gets the rows of
    every step, and `on_progress` is called many times in each. The run's own trainer starts from its newest stored
    checkpoint before the range, or from the start model, with the number of threads of the run's config, which torch
    keeps. Memory holds one more copy of policy and optimizer per loss.

    Raises, before anything is trained: InputError for an unknown loss, ReplayError if nothing is selected, too little
    is stored or the vocabulary differs, ModelFolderError, StreamCorrupt. Later: StreamCorrupt for damaged trajectories,
    and TrainingDiverged.
    """
    config = attempt_config(run.attempt)
    training, trainings = config.training, config.trainings()
    chosen = [make_loss(training, name) for name in dict.fromkeys(losses)]
    rows = select(run, selection)
    steps = run.groups["step"].to_numpy()[rows]
    start = max((version for version in run.checkpoints if version < steps[0]), default=0)
    batches = {step: run.batch(step) for step in range(start + 1, int(steps[-1]) + 1)}
    if missing := [step for step, batch in batches.items() if len(batch) == 0]:
        raise ReplayError(
            f"the batch of step {missing[0]} is not stored", file=run.url, expected="a range without a gap before it"
        )
    run.check_stored(np.concatenate(list(batches.values())))
    torch.set_num_threads(training.num_threads)
    original = start_trainer(run, start)
    # Gradients compare only at the same weights.
    copies = [start_trainer(run, start, one_update=True) for _ in chosen]
    original.on_progress = on_progress
    for copy, loss in zip(copies, chosen, strict=True):
        copy.on_progress = on_progress
        copy.set_loss(loss)

    def samples_in(groups: Sequence[ScoredGroup]) -> list[Sample]:
        masked = [mask_truncated(group, training.selection) for group in groups]
        return samples_of(masked, training, original.policy_version, trainings)

    table: list[Row] = []
    for step, batch in batches.items():
        selected = rows[steps == step]
        all_rows: list[int] = np.union1d(batch, selected).tolist()
        groups = dict(zip(all_rows, run.read(all_rows), strict=True))
        compared = samples_in([groups[row] for row in selected])
        rate_factor = run.rate_factor(step)
        loss_rows = compare_losses(original, copies, compared, rate_factor) if compared else []
        logprobs = original.step(samples_in([groups[row] for row in batch]), rate_factor).trainer_logprobs
        if loss_rows:
            head: Row = {
                "step": step,
                "staleness_mean": float(run.groups["staleness"].to_numpy()[selected].mean()),
                "groups": len(selected),
                "logprob_error": _logprob_error(run, step, logprobs),
            }
            step_rows = [head | row for row in loss_rows]
            table += step_rows
            each(step_rows)
    return pa.Table.from_pylist(table, schema=comparison_schema([loss.name for loss in chosen]))


def _logprob_error(run: SourceRun, step: int, logprobs: Sequence[npt.NDArray[np.float32]]) -> float | None:
    """Largest difference to the run's stored log π of that step, nats; None if not stored. Raises ReplayError."""
    if not run.logprobs_stored(step):
        return None
    stored = run.trainer_logprobs(step)
    if [len(values) for values in stored] != [len(values) for values in logprobs]:
        expected = "the scores that the run trained with"
        raise ReplayError(f"step {step} trains other trajectories than the run did", file=run.url, expected=expected)
    return float(max(np.abs(a - b).max() for a, b in zip(stored, logprobs, strict=True)))


def compare_losses(
    original: Trainer, copies: Sequence[Trainer], samples: Sequence[Sample], rate_factor: float = 1.0
) -> list[Row]:
    """A row per copy: one step on the samples from the original's weights, which stay as they are."""
    rows: list[Row] = []
    for copy in copies:
        copy.copy_state_from(original)
        report = copy.step(samples, rate_factor)
        row = {name: getattr(report, name) for name in REPORTED}
        rows.append(row | {"loss": copy.loss.name, "surrogate": report.loss})
    implied_kls = mean_token_kl(original, copies, samples)
    names = [f"{COSINE}{copy.loss.name}" for copy in copies]
    for row, cosines, implied_kl in zip(rows, gradient_cosines(copies), implied_kls, strict=True):
        row |= dict(zip(names, cosines, strict=True)) | {"implied_kl": implied_kl}
    return rows


@torch.no_grad()
def mean_token_kl(policy: Trainer, copies: Sequence[Trainer], samples: Sequence[Sample]) -> list[float]:
    """[copies] mean of KL(policy ‖ copy) over the trainable tokens and the whole vocabulary, nats."""
    sums, tokens = np.zeros(len(copies)), 0
    for batch in policy.microbatches(samples):
        logprobs_NV = _logprobs(policy, batch)
        tokens += len(batch.trainable_L)
        for number, copy in enumerate(copies):
            kl_N = (logprobs_NV.exp() * (logprobs_NV - _logprobs(copy, batch))).sum(dim=-1)
            sums[number] += float(kl_N[batch.trainable_L].sum())
    return (sums / tokens).tolist()  # type: ignore[no-any-return]


def _logprobs(trainer: Trainer, batch: Microbatch) -> torch.Tensor:
    """[N, V] float64, normalised again: float32 rounding would be as large as a small step's KL."""
    return torch.log_softmax(trainer.logprobs_of(batch).double(), dim=-1)


def gradient_cosines(trainers: Sequence[Trainer]) -> list[list[float | None]]:
    """[trainers, trainers] cosine between their last gradients, in [-1, 1]; None where one of them is 0."""
    gradients = [[parameter.grad for parameter in trainer.model.parameters()] for trainer in trainers]
    size = len(trainers)
    dots = np.zeros((size, size))
    for i, j in combinations_with_replacement(range(size), 2):
        pairs = zip(gradients[i], gradients[j], strict=True)
        dots[i, j] = dots[j, i] = sum(
            (a.double() * b.double()).sum().item() for a, b in pairs if a is not None and b is not None
        )
    norms = np.sqrt(np.diag(dots))
    return [
        [float(dots[i, j] / (norms[i] * norms[j])) if norms[i] and norms[j] else None for j in range(size)]
        for i in range(size)
    ]
