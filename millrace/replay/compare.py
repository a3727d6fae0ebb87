"""Several losses on the batches of a stored run; nothing that is trained here is kept.

run ─► whole batch of step k ─► original: the run's own trainer repeats its steps
                                 ├─► log π of each token, compared with what was stored
       selected groups ─────────►└─ weights, optimizer state ─► copy with loss 1 ─► one step ─┐
                                                             ├► copy with loss 2 ─► one step ─┴► a row per loss:
                                                             └► …       gradient, cosines, KL of the step

Every copy starts each step from the original's weights.
"""

from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import torch

from configs.requests import Selection
from configs.training import SelectionConfig, TrainingConfig
from millrace.errors import ReplayError
from millrace.replay.comparison import COSINE, Comparison, Row, comparison_schema
from millrace.replay.selection import select
from millrace.replay.source_run import SourceRun
from millrace.replay.verify import start_trainer
from millrace.rollouts.masking import mask_truncated
from millrace.rollouts.scored_group import ScoredGroup
from millrace.training.batch import Microbatch, Sample
from millrace.training.losses.factory import make_loss
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer
from storage.errors import PartRemoved


def compare(
    run: SourceRun,
    losses: Sequence[str],
    *,
    selection: Selection,
    each: Callable[[list[Row]], None] = lambda rows: None,
    on_progress: Callable[[], None] = lambda: None,
) -> Comparison:
    """Computes each of `losses`, with the parameters of the run's config, on the selected groups of each step.

    `each` gets the rows of every step, and `on_progress` is called many times in each. The run's own trainer starts
    from its newest stored checkpoint before the range, or from the start model, with the number of threads of the run's
    config, which torch keeps. One copy of policy and optimizer per loss is held beside it.

    Raises, before anything is trained: InputError for an unknown loss, ReplayError if nothing is selected, too little
    is stored or the vocabulary differs, ModelFolderError, StreamCorrupt. Later: StreamCorrupt for damaged trajectories,
    and TrainingDiverged.
    """
    training = TrainingConfig.model_validate(run.config["training"])
    chosen = [make_loss(training, name) for name in dict.fromkeys(losses)]
    rows = select(run, selection)
    steps = run.groups["step"].to_numpy()[rows]
    start = max((version for version in run.checkpoints if version < steps[0]), default=0)
    repeated = range(start + 1, int(steps[-1]) + 1)
    _check_batches(run, repeated)
    torch.set_num_threads(training.threads)
    original = start_trainer(run, start)
    # Gradients compare only at the same weights.
    copies = [start_trainer(run, start, one_update=True) for _ in chosen]
    original.on_progress = on_progress
    for copy, loss in zip(copies, chosen, strict=True):
        copy.on_progress = on_progress
        copy.set_loss(loss)
    side_by_side = SideBySide(original, copies, advantage=training.advantage, selection=training.selection)
    table: list[Row] = []
    for step in repeated:
        selected = rows[steps == step]
        batch, compared = _read(run, run.batch(step), selected)
        loss_rows, logprobs = side_by_side.step(batch, compared)
        if not loss_rows:
            continue
        head: Row = {
            "step": step,
            "staleness_mean": float(run.groups["staleness"].to_numpy()[selected].mean()),
            "groups": len(compared),
            "logprob_error": _logprob_error(run, step, logprobs),
        }
        step_rows = [head | row for row in loss_rows]
        table += step_rows
        each(step_rows)
    return Comparison(pa.Table.from_pylist(table, schema=comparison_schema([loss.name for loss in chosen])))


def _check_batches(run: SourceRun, steps: range) -> None:
    """Raises ReplayError unless everything that the run trained on in `steps` still exists."""
    batches = [run.batch(step) for step in steps]
    for step, batch in zip(steps, batches, strict=True):
        if len(batch) == 0:
            raise ReplayError(f"{run.url}: what step {step} trained is not stored, and steps after it depend on it")
    run.check_stored(np.concatenate(batches))


def _read(
    run: SourceRun, batch: npt.NDArray[np.int64], compared: npt.NDArray[np.int64]
) -> tuple[list[ScoredGroup], list[ScoredGroup]]:
    """The groups of both, each read once."""
    rows: list[int] = np.union1d(batch, compared).tolist()
    groups: Mapping[int, ScoredGroup] = dict(zip(rows, run.read(rows), strict=True))
    return [groups[row] for row in batch.tolist()], [groups[row] for row in compared.tolist()]


def _logprob_error(run: SourceRun, step: int, found: Sequence[npt.NDArray[np.float32]]) -> float | None:
    """Largest difference to the run's stored log π of that step, nats; None if not stored. Raises ReplayError."""
    if not run.logprobs_stored(step):
        return None
    try:
        stored = run.trainer_logprobs(step)
    except PartRemoved:
        return None
    if [len(one) for one in stored] != [len(one) for one in found]:
        raise ReplayError(
            f"{run.url}: with the scores in use step {step} trains {len(found)} trajectories, and it trained "
            f"{len(stored)}; expected the scores that the run trained with"
        )
    return float(max(np.abs(a - b).max() for a, b in zip(stored, found, strict=True)))


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
            copy.copy_state_from(self.original)
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
        trainable_N = np.zeros(len(sample_N))
        trainable_N[batch.trainable_L.numpy()] = 1
        for other, (sums, counts) in zip(others, found, strict=True):
            kl_N = (logprobs_NV.exp() * (logprobs_NV - _logprobs(other, batch))).sum(dim=-1).cpu().numpy()
            sums += np.bincount(sample_N, kl_N * trainable_N, minlength=size)
            counts += np.bincount(sample_N, trainable_N, minlength=size)
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
