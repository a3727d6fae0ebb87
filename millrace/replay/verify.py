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
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import numpy.typing as npt
import torch

from millrace.errors import ReplayError
from millrace.models.start_folder import start_folder
from millrace.replay.results import CheckpointVerdict, Mismatch, ReplayVerdict, StepVerdict
from millrace.replay.source_run import SourceRun
from millrace.rollouts.masking import mask_truncated
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.history import read_steps
from millrace.runs.provenance import differences, provenance
from millrace.runs.record import attempt_of_step
from millrace.runtime.arguments import attempt_config
from millrace.training.batch import Sample
from millrace.training.checkpoints.names import MODEL, OPTIMIZER
from millrace.training.checkpoints.reading import StoredTensors
from millrace.training.samples import samples_of
from millrace.training.trainer import Trainer, load_trainer
from millrace.weights.fingerprint import fingerprint
from storage.checkpoints import load_files
from storage.errors import StreamCorrupt
from storage.stores.base import Store


class _Differs(Exception):
    """Ends the verification: what differs, a sentence and its causes, as in Mismatch."""


def verify(
    store: Store,
    *,
    from_step: int | None = None,
    to_step: int | None = None,
    tolerance: float | None = None,
    each: Callable[[StepVerdict], None] = lambda step: None,
    on_progress: Callable[[], None] = lambda: None,
) -> ReplayVerdict:
    """Trains the steps of the run in `store` again, up to the one that made version `to_step` (None: the last).

    It starts from the start model, or from the stored checkpoint of version `from_step`. `tolerance` bounds the
    absolute difference of log-probabilities (nats), weights and optimizer state; None: they must be equal bit for bit.
    `each` gets every step that passed, and `on_progress` is called many times in each. Ends at the first that fails, or
    at damage; the verdict names either.

    Raises, before anything is trained, ReplayError if the run stored too little, RunMissing, and ModelFolderError.
    """
    verdict = ReplayVerdict(url=store.url, from_step=from_step or 0, tolerance=tolerance)
    threads = torch.get_num_threads()
    try:
        run = SourceRun(store)
        steps = _steps(run, verdict.from_step, to_step)
        verification = _Verification(run, verdict)
        verification.trainer.on_progress = on_progress
        for step in steps:
            passed = verification.train(step)
            verdict.passed.append(passed)
            each(passed)
    except (_Differs, StreamCorrupt) as error:
        what, sentence, causes = error.args if isinstance(error, _Differs) else ("damage", str(error), ())
        step = verdict.from_step + len(verdict.passed) + 1
        verdict.difference = Mismatch(step=step, what=what, sentence=sentence, causes=causes)
    finally:
        torch.set_num_threads(threads)
    return verdict


def _steps(run: SourceRun, from_step: int, to_step: int | None) -> range:
    """The steps to train again. Raises ReplayError unless everything they need is stored."""
    last = run.steps[-1] if to_step is None else to_step
    steps = range(from_step + 1, last + 1)
    if not steps or set(steps) - set(run.steps):
        expected = f"steps from {run.steps[0]} to {run.steps[-1]}"
        raise ReplayError(f"steps {from_step + 1} to {last} are not stored", file=run.url, expected=expected)
    if from_step:
        run.checkpoint(from_step)
    if not any(step in run.checkpoints or run.logprobs_stored(step) for step in steps):
        read = f"neither checkpoints nor log-probabilities of steps {steps[0]} to {last} are stored"
        versions = ", ".join(map(str, run.checkpoints)) or "none, as no checkpoint is stored"
        raise ReplayError(read, file=run.url, expected=f"a range with one of the checkpoints: {versions}")
    run.check_stored(np.concatenate([run.batch(step) for step in steps]))
    return steps


class _Verification:
    def __init__(self, run: SourceRun, verdict: ReplayVerdict) -> None:
        self._run = run
        self._verdict = verdict
        self.trainer = start_trainer(run, verdict.from_step)
        config = attempt_config(run.attempt)
        self._training, self._trainings = config.training, config.trainings()
        self._provenance = provenance(run.config)
        steps = read_steps(run.store)
        # What happened, not what was configured: a trainer on a host without a compiler ran uncompiled.
        self._compiled = {
            step.policy_version: step.values["compiled"] > 0 for step in steps if "compiled" in step.values
        }

    def train(self, step: int) -> StepVerdict:
        """Trains one step. Raises _Differs and StreamCorrupt."""
        self._set_environment(step)
        rows = self._run.batch(step).tolist()
        groups = [mask_truncated(group, self._training.selection) for group in self._run.read(rows)]
        samples = self._checked_samples(step, rows, groups)
        report = self.trainer.step(samples, self._run.rate_factor(step))
        return StepVerdict(
            step=step,
            rollouts=len(samples),
            tokens=sum(len(sample.response_tokens) for sample in samples),
            logprobs_difference=self._compare_logprobs(step, groups, report.trainer_logprobs),
            checkpoint=self._compare_checkpoint(step),
        )

    def _set_environment(self, step: int) -> None:
        """Sets the threads of the attempt that made the step, and records how its environment differs from this one."""
        attempt = attempt_of_step(self._run.store, step)
        training = attempt_config(attempt).training
        torch.set_num_threads(training.num_threads)
        self._verdict.unlike |= differences(attempt.provenance, self._provenance)
        # The summation of a gradient, by microbatch and rank, decides its last bits. This process is one rank.
        per_microbatch = "training.max_tokens_per_microbatch"
        for name, there, here in (
            (per_microbatch, training.max_tokens_per_microbatch, self._training.max_tokens_per_microbatch),
            ("training.parallel.data", training.parallel.data, 1),
            ("training.parallel.tensor", training.parallel.tensor, 1),
            ("training.device", training.device, "cpu"),
            ("training.compile", self._compiled.get(step, self.trainer.compiles), self.trainer.compiles),
        ):
            if here != there:
                self._verdict.unlike[name] = (there, here)

    def _checked_samples(self, step: int, rows: Sequence[int], groups: Sequence[ScoredGroup]) -> list[Sample]:
        """The samples of the groups; their rewards and advantages must be those that the trainer used."""
        for row, group in zip(rows, groups, strict=True):
            for index, (used, stored) in enumerate(zip(self._run.rewards(row), group.rewards, strict=True)):
                if used != stored:
                    raise _data_differs(group, index, f"the stored reward is {stored}, the trainer used {used}")
        version = self.trainer.policy_version
        samples = samples_of(groups, self._training, version, self._trainings)
        recorded = self._run.advantages(step)
        for (group, index), sample, used in zip(_members(groups), samples, recorded, strict=True):
            stored = float(np.float32(sample.advantage))
            if used != stored:
                clause = f"the advantage by the stored rewards is {stored}, the trainer used {used}"
                raise _data_differs(group, index, clause)
        return samples

    def _compare_logprobs(
        self, step: int, groups: Sequence[ScoredGroup], logprobs: Sequence[npt.NDArray[np.float32]]
    ) -> float | None:
        if not self._run.logprobs_stored(step):
            return None
        pairs = zip(logprobs, self._run.trainer_logprobs(step), strict=True)
        distances = [_difference(torch.tensor(repeated), torch.tensor(stored)) for repeated, stored in pairs]
        worst = max(distances)
        if worst > (self._verdict.tolerance or 0.0):
            num_different = sum(distance > 0 for distance in distances)
            causes = self._causes()
            if num_different < len(distances):
                causes += ("the stored trajectories are not those that the run trained on",)
            elif step == 1:
                causes += ("the start model is not the one that the run started from",)
            sentence = (
                f"log π before the step differs on {num_different} of {len(distances)} trajectories, "
                f"most of all, by {worst:g} nats, on {_where(*_members(groups)[distances.index(worst)])}"
            )
            raise _Differs("logprobs", sentence, causes)
        return worst

    def _compare_checkpoint(self, step: int) -> CheckpointVerdict | None:
        if step not in self._run.checkpoints:
            return None
        files = (self.trainer.state(), load_files(self._run.store, self._run.checkpoints[step]))
        digests, distances = [], []
        for kind in (MODEL, OPTIMIZER):
            repeated, stored = (StoredTensors(each, kind).read_whole() for each in files)
            digests.append((fingerprint(repeated).digest, fingerprint(stored).digest))
            distances.append(_largest_difference(repeated, stored))
        digest, stored_digest = digests[0]
        identical = all(a == b for a, b in digests)
        tolerance = self._verdict.tolerance
        if not identical and (tolerance is None or max(distances) > tolerance):
            sentence = (
                f"the checkpoint's weights are {stored_digest}, trained again {digest}: they differ by at most "
                f"{distances[0]:g}, the optimizer's state by {distances[1]:g}"
            )
            raise _Differs("weights", sentence, self._causes())
        return CheckpointVerdict(step=step, stored_hash=stored_digest, hash=digest, identical=identical)

    def _causes(self) -> tuple[str, ...]:
        return tuple(f"{name} was {there} and is {here}" for name, (there, here) in self._verdict.unlike.items())


def start_trainer(run: SourceRun, from_step: int, *, one_update: bool = False) -> Trainer:
    """A trainer like the run's own, with the start model (0) or with its stored checkpoint of version `from_step`.

    `one_update`: it makes a single update on each batch, whatever the config says.
    Raises ModelFolderError, ReplayError if the model is a different one, and StreamCorrupt for a damaged checkpoint.
    """
    config = attempt_config(run.attempt)
    training = config.effective_training
    if one_update:
        training = training.model_copy(update={"minibatches": 1, "epochs": 1})
    with TemporaryDirectory() as cache:
        folder = start_folder(run.store, config.model.path, Path(cache))
        trainer = load_trainer(
            Trainer,
            folder,
            training,
            trainings=config.trainings(),
            dtype=config.model.dtype,
            generation_dtype=config.generation_dtype,
            seed=config.seed,
        )
    expected = f"the model that {run.url} started from"
    if run.vocab_size not in (None, trainer.vocab_size):
        read = f"its vocabulary has {trainer.vocab_size} tokens, but the run's has {run.vocab_size}"
        raise ReplayError(read, file=folder, expected=expected)
    if from_step:
        files = load_files(run.store, run.checkpoint(from_step))
        shapes = {name: tensor.shape for name, tensor in trainer.tensors()[MODEL].items()}
        if StoredTensors(files, MODEL).shapes != shapes:
            raise ReplayError("its tensors differ from those of the checkpoints", file=folder, expected=expected)
        trainer.restore(from_step, files)
    return trainer


def _data_differs(group: ScoredGroup, index: int, clause: str) -> _Differs:
    causes = ("the stored scores are not those that the run trained with",)
    return _Differs("data", f"{_where(group, index)}: {clause}", causes)


def _members(groups: Sequence[ScoredGroup]) -> list[tuple[ScoredGroup, int]]:
    """(group, index in it) of each trained trajectory, in the order of the batch."""
    return [(group, index) for group in groups for index in group.trained]


def _where(group: ScoredGroup, index: int) -> str:
    return f"group {group.group_id}, member {index} (generator {group.generator}, row {group.first_row_id + index})"


def _largest_difference(tensors: Mapping[str, torch.Tensor], stored: Mapping[str, torch.Tensor]) -> float:
    """The largest `_difference` of all tensors; infinite if their names differ."""
    if tensors.keys() != stored.keys():
        return math.inf
    return max((_difference(tensor, stored[name]) for name, tensor in tensors.items()), default=0.0)


def _difference(a: torch.Tensor, b: torch.Tensor) -> float:
    """Largest absolute difference; infinite if an element is not finite or the shapes differ."""
    if a.shape != b.shape:
        return math.inf
    if torch.equal(a, b):
        return 0.0
    worst = float((a.double() - b.double()).abs().max())
    return worst if math.isfinite(worst) else math.inf
