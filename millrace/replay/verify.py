"""Trains a stored run's own batches again and compares: equal bit for bit, or else the first difference and its cause.

    start model, or a stored checkpoint ─► trainer ◄── samples ◄── read ◄── rewards, advantages as recorded? ◄── batch k
                                              │
            log π of each token of step k ◄───┼───► weights and optimizer of version k
                      ║                       │                    ║
            as in trainer_logprobs?           ▼            as in the checkpoint, if one is stored?
                                        step k + 1, until one differs

Nothing is written. The trainer is built as in the train stage, with the number of threads of the original attempt.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from millrace.errors import ReplayError
from millrace.models.loading import load_model
from millrace.models.start_folder import start_folder
from millrace.replay.source_run import SourceRun
from millrace.replay.verdict import CheckpointVerdict, Difference, StepVerdict, Verdict
from millrace.rollouts.masking import mask_truncated
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.decisions import rate_factor, read_decisions
from millrace.runs.provenance import differences, provenance
from millrace.runs.record import attempt_of_step
from millrace.runtime.arguments import attempt_config
from millrace.training.batch import Sample
from millrace.training.checkpoints.names import MODEL, OPTIMIZER
from millrace.training.checkpoints.reading import StoredTensors
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer
from millrace.weights.fingerprint import fingerprint
from storage.checkpoints import load_files
from storage.errors import StreamCorrupt
from storage.stores.base import Store

_ROUNDING = 1e-2
"""Nats: log π under the same weights differs by less between libraries, CPUs or numbers of threads."""


class _Differs(Exception):
    """Carries the first difference out of the loop."""

    def __init__(self, difference: Difference) -> None:
        super().__init__(difference.sentence)
        self.difference = difference


def verify(
    store: Store,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    tolerance: float | None = None,
    threads: int | None = None,
    each: Callable[[StepVerdict], None] = lambda step: None,
    on_progress: Callable[[], None] = lambda: None,
) -> Verdict:
    """Trains the steps of the run in `store` again, up to the one that made version `to_step` (None: the last).

    It starts from the start model, or from the stored checkpoint of version `from_step`. `tolerance` bounds the
    absolute difference of log-probabilities (nats), weights and optimizer state; None: they must be equal bit for bit.
    `threads` of the CPU; None: as many as the run's trainer had. `each` gets every step that passed, and
    `on_progress` is called many times in each. Ends at the first that fails, or at damage; the verdict names either.

    Raises, before anything is trained, ReplayError if the run stored too little, RunMissing, and ModelFolderError.
    """
    started = time.perf_counter()
    verdict = Verdict(url=store.url, from_step=from_step or 0, tolerance=tolerance)
    threads_before = torch.get_num_threads()
    try:
        run = SourceRun(store)
        steps = _steps(run, verdict.from_step, to_step)
        verification = _Verification(run, verdict, threads)
        verification.trainer.on_progress = on_progress
        verification.run(steps, each)
    except _Differs as differs:
        verdict.difference = differs.difference
    except StreamCorrupt as damage:
        step = verdict.from_step + verdict.steps + 1
        verdict.difference = Difference(step=step, what="damage", sentence=str(damage))
    finally:
        torch.set_num_threads(threads_before)
    verdict.seconds = time.perf_counter() - started
    return verdict


def _steps(run: SourceRun, from_step: int, to_step: int | None) -> range:
    """The steps to train again. Raises ReplayError unless everything they need is stored."""
    last = run.steps[-1] if to_step is None else to_step
    steps = range(from_step + 1, last + 1)
    there = f"stored are steps {run.steps[0]} to {run.steps[-1]}"
    if not steps:
        raise ReplayError(f"{run.url}: there is no step after version {from_step} up to version {last}; {there}")
    if missing := sorted(set(steps) - set(run.steps)):
        raise ReplayError(f"{run.url}: what step {missing[0]} trained is not stored; {there}")
    if from_step:
        run.checkpoint(from_step)
    if not run.checkpoints:
        raise ReplayError(f"{run.url}: the run has no checkpoint with its files: there are no weights to compare with")
    if not any(step in run.checkpoints or run.logprobs_stored(step) for step in steps):
        raise ReplayError(
            f"{run.url}: of steps {steps[0]} to {last} neither checkpoints nor log-probabilities are stored: there is "
            f"nothing to compare with; checkpoints are stored of: {', '.join(map(str, run.checkpoints))}"
        )
    run.check_stored(np.concatenate([run.batch(step) for step in steps]))
    return steps


class _Verification:
    def __init__(self, run: SourceRun, verdict: Verdict, threads: int | None) -> None:
        self._run = run
        self._verdict = verdict
        self._threads = threads
        self._attempt = -1
        self.trainer = start_trainer(run, verdict.from_step)
        self._decisions = read_decisions(run.store)
        training = attempt_config(run.attempt).training
        self._advantage, self._selection = training.advantage, training.selection
        self._max_tokens_per_microbatch = training.max_tokens_per_microbatch
        self._here = provenance(run.config)

    def run(self, steps: range, each: Callable[[StepVerdict], None]) -> None:
        """Trains the steps. Raises _Differs at the first one that differs, and StreamCorrupt."""
        for step in steps:
            self._as_in_attempt(step)
            rows = self._run.batch(step)
            groups = [mask_truncated(group, self._selection) for group in self._run.read(rows.tolist())]
            self._compare_rewards(step, rows, groups)
            samples = samples_of(groups, self._advantage, self.trainer.policy_version, self._selection)
            self._compare_advantages(step, groups, samples)
            report = self.trainer.step(samples, rate_factor(self._decisions, self._run.incarnation(rows)))
            passed = StepVerdict(
                step=step,
                rollouts=len(samples),
                tokens=sum(len(sample.response_tokens) for sample in samples),
                logprobs_difference=self._compare_logprobs(step, groups, report.trainer_logprobs),
                checkpoint=self._compare_checkpoint(step),
            )
            self._verdict.add(passed)
            each(passed)

    def _as_in_attempt(self, step: int) -> None:
        """Sets the threads of the attempt that made the step, and records how its environment differs from this one."""
        attempt = attempt_of_step(self._run.store, step)
        if attempt.number == self._attempt:
            return
        self._attempt = attempt.number
        training = attempt_config(attempt).training
        threads = self._threads or training.threads
        torch.set_num_threads(threads)
        self._verdict.unlike |= differences(attempt.provenance, self._here)
        # How a gradient is summed, by microbatch and rank, changes its last bits. Here there is one rank.
        for name, there, here in (
            ("training.threads", training.threads, threads),
            ("training.max_tokens_per_microbatch", training.max_tokens_per_microbatch, self._max_tokens_per_microbatch),
            ("training.parallel.data", training.parallel.data, 1),
            ("training.parallel.tensor", training.parallel.tensor, 1),
            ("training.device", training.device, "cpu"),
        ):
            if here != there:
                self._verdict.unlike[name] = (there, here)

    def _compare_rewards(self, step: int, rows: npt.NDArray[np.int64], groups: Sequence[ScoredGroup]) -> None:
        for row, group in zip(rows.tolist(), groups, strict=True):
            for index, (trained, stored) in enumerate(zip(self._run.rewards(row), group.rewards, strict=True)):
                if trained != stored:
                    raise _data_differs(
                        step, group, index, f"the stored reward is {stored}, the trainer used {trained}"
                    )

    def _compare_advantages(self, step: int, groups: Sequence[ScoredGroup], samples: Sequence[Sample]) -> None:
        recorded = self._run.advantages(step)
        for (group, index), sample, trained in zip(_members(groups), samples, recorded, strict=True):
            stored = float(np.float32(sample.advantage))
            if trained != stored:
                what = f"the advantage by the stored rewards is {stored}, the trainer used {trained}"
                raise _data_differs(step, group, index, what)

    def _compare_logprobs(
        self, step: int, groups: Sequence[ScoredGroup], found: Sequence[npt.NDArray[np.float32]]
    ) -> float | None:
        if not self._run.logprobs_stored(step):
            return None
        stored = self._run.trainer_logprobs(step)
        apart = [_difference(a, b) for a, b in zip(found, stored, strict=True)]
        worst = max(range(len(apart)), key=lambda place: apart[place])
        if self._passes(apart[worst]):
            return apart[worst]
        different = sum(difference > 0 for difference in apart)
        sentence = (
            f"log π before the step differs on {different} of {len(apart)} trajectories, "
            f"most of all, by {apart[worst]:g} nats, on {_where(*_members(groups)[worst])}"
        )
        causes = self._causes()
        likely = None
        if different < len(apart):
            likely = "the stored trajectories are not those that the run trained on"
        elif step == 1:
            likely = "the start model is not the one that the run started from"
        if likely and (apart[worst] > _ROUNDING or not causes):
            causes = (likely, *causes)
        raise _Differs(Difference(step=step, what="logprobs", sentence=sentence, causes=causes))

    def _compare_checkpoint(self, step: int) -> CheckpointVerdict | None:
        if step not in self._run.checkpoints:
            return None
        stored = load_files(self._run.store, self._run.checkpoints[step])
        found = self.trainer.state()
        weights, old_weights = (StoredTensors(files, MODEL).read_whole() for files in (found, stored))
        optimizer, old_optimizer = (StoredTensors(files, OPTIMIZER).read_whole() for files in (found, stored))
        compared = CheckpointVerdict(
            step=step,
            stored_hash=fingerprint(old_weights).digest,
            hash=fingerprint(weights).digest,
            weights_difference=_tensor_difference(weights, old_weights),
            optimizer_identical=fingerprint(optimizer).digest == fingerprint(old_optimizer).digest,
            optimizer_difference=_tensor_difference(optimizer, old_optimizer),
        )
        apart = max(compared.weights_difference, compared.optimizer_difference)
        if compared.identical or (self._verdict.tolerance is not None and self._passes(apart)):
            return compared
        sentence = (
            f"the checkpoint's weights are {compared.stored_hash}, trained again {compared.hash}: they differ by at "
            f"most {compared.weights_difference:g}, the optimizer's state by {compared.optimizer_difference:g}"
        )
        raise _Differs(Difference(step=step, what="weights", sentence=sentence, causes=self._causes()))

    def _passes(self, apart: float) -> bool:
        return apart <= (self._verdict.tolerance or 0.0)

    def _causes(self) -> tuple[str, ...]:
        return tuple(f"{name} was {was} and is {here}" for name, (was, here) in self._verdict.unlike.items())


def start_trainer(run: SourceRun, from_step: int, *, one_update: bool = False) -> Trainer:
    """A trainer like the run's own, with the start model (0) or with its stored checkpoint of version `from_step`.

    `one_update`: it makes a single update on each batch, whatever the config says.
    Raises ModelFolderError, ReplayError if the model is a different one, and StreamCorrupt for a damaged checkpoint.
    """
    config = attempt_config(run.attempt)
    torch.manual_seed(config.seed)
    with TemporaryDirectory() as cache:
        folder = start_folder(run.store, config.model.path, Path(cache))
        model = load_model(folder, config.model.dtype)
        reference = load_model(folder, config.model.dtype) if config.training.kl.coefficient else None
    training = config.effective_training
    if one_update:
        training = training.model_copy(update={"minibatches": 1, "epochs": 1})
    trainer = Trainer(
        model,
        training,
        max_new_tokens=config.generation.max_new_tokens,
        seed=config.seed,
        reference=reference,
        published_dtype=getattr(torch, config.generation_dtype),
    )
    if run.vocab_size not in (None, trainer.vocab_size):
        raise ReplayError(
            f"{folder}: its model has a vocabulary of {trainer.vocab_size}, but the tokens of {run.url} are of one of "
            f"{run.vocab_size}; expected the model that the run started from"
        )
    if from_step:
        files = load_files(run.store, run.checkpoint(from_step))
        if StoredTensors(files, MODEL).shapes != _shapes(trainer.tensors()[MODEL]):
            raise ReplayError(f"{folder}: its model has other tensors than the checkpoints of {run.url}")
        trainer.restore(from_step, files)
    return trainer


def _shapes(tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _data_differs(step: int, group: ScoredGroup, index: int, sentence: str) -> _Differs:
    causes = ("the stored scores are not those that the run trained with",)
    return _Differs(Difference(step=step, what="data", sentence=f"{_where(group, index)}: {sentence}", causes=causes))


def _members(groups: Sequence[ScoredGroup]) -> list[tuple[ScoredGroup, int]]:
    """(group, index in it) of each trained trajectory, in the order of the batch."""
    return [(group, index) for group in groups for index in group.trained]


def _where(group: ScoredGroup, index: int) -> str:
    return f"group {group.group_id}, member {index} (generator {group.generator}, row {group.first_row_id + index})"


def _difference(found: npt.NDArray[np.float32], stored: npt.NDArray[np.float32]) -> float:
    """Largest absolute difference; infinite if one is not finite or lengths differ."""
    if found.tobytes() == stored.tobytes():
        return 0.0
    if found.shape != stored.shape:
        return math.inf
    worst = float(np.abs(found.astype(np.float64) - stored).max())
    return worst if math.isfinite(worst) else math.inf


def _tensor_difference(found: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> float:
    """The largest absolute difference over all tensors, as `_difference`."""
    if _shapes(found) != _shapes(stored):
        return math.inf
    pairs = [(found[name].double().flatten(), stored[name].double().flatten()) for name in found]
    worst = max((float((a - b).abs().max()) for a, b in pairs if a.numel()), default=0.0)
    return worst if math.isfinite(worst) else math.inf
