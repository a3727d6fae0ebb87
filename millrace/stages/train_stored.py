"""The train stage of a replay: the batches of stored runs in, policy versions out, and nobody to wait for.

    ║ consumed ║ of each source ─► plan: batches ─► next batch, read ahead ─► trainer ─► version + 1
                                                                                 ├─► ║ consumed ║ + ║ trainer_logprobs ║
                                                                                 └─► every few steps: checkpoint

Consumes: trajectories and scores that were stored long ago, in the order of the plan. Produces: policy versions,
checkpoints, and the same records as a live trainer. Batch i makes version `start_step + i + 1`, so the version of a
checkpoint says where to go on.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from millrace.checkpointing.saving import AsyncCheckpoints
from millrace.consumed import ConsumedWriter
from millrace.errors import ReplayError
from millrace.lineage import Lineage
from millrace.losses.factory import check_needs
from millrace.parallel.led import restore
from millrace.replay.batches import planned
from millrace.replay.parts import Scores
from millrace.replay.plan import Batch
from millrace.replay.spec import ReplaySpec
from millrace.replay.stored import StoredRun
from millrace.samples import samples_of
from millrace.scored import ScoredGroup
from millrace.stages.measures import step_measures
from millrace.stages.process import Stage
from millrace.step_report import StepReport
from millrace.trainer import Trainer
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.factory import open_store
from storage.schema import TRAJECTORY


@dataclass(frozen=True, kw_only=True)
class StoredBatch:
    """The groups of one step, in the order of the batch."""

    groups: list[ScoredGroup]
    staleness: list[int]
    """[groups] what it was when the source trained the group, policy versions."""


class StoredLoop:
    """The loop above. `found` is the checkpoint of this very replay that `trainer` was restored from, if any."""

    def __init__(
        self,
        stage: Stage,
        spec: ReplaySpec,
        trainer: Trainer,
        writer: CheckpointWriter,
        checkpoints: AsyncCheckpoints,
        consumed: ConsumedWriter,
        found: Checkpoint | None,
    ) -> None:
        self.stage = stage
        self.trainer = trainer
        self.incarnation = writer.incarnation
        self.checkpoints = checkpoints
        self.consumed = consumed
        self.lineage = Lineage.after(found, writer.incarnation)
        check_needs(trainer.loss, TRAJECTORY.names)
        runs = open_sources(stage, spec)
        first = spec.start_step or 0
        if found is None and spec.start_step is not None:
            start_from(trainer, runs[0], spec.start_step)
        plan = planned(runs, spec, stage.config)[: stage.config.training.max_steps - first]
        self.stop_at_step = first + len(plan)
        self.batches = _read_ahead(runs, plan[trainer.policy_version - first :])
        self.rollouts = self.tokens = 0
        # The version of the checkpoint taken last; on its way, or there.
        self.checkpointed: int | None = None
        stage.ready(f"trainer ready at version {trainer.policy_version} of {self.stop_at_step}, on stored rollouts")
        if found is not None:
            self.rollouts, self.tokens = found.state["rollouts"], found.state["tokens"]
            self.checkpointed = writer.adopt(found, self._state()).step

    def run(self) -> None:
        """Until the plan is done, or until asked to drain."""
        self._report(None)
        while self.trainer.policy_version < self.stop_at_step and not self.stage.draining:
            self.checkpoints.check()
            with self.stage.busy("intake"):
                batch = next(self.batches)
            self._step(batch)
            if self.trainer.policy_version % self.stage.config.training.checkpoint_every == 0:
                self._checkpoint()
        if self.checkpointed != self.trainer.policy_version:
            self._checkpoint()
        with self.stage.busy("checkpoint"):
            self.checkpoints.finish()

    def _step(self, batch: StoredBatch) -> None:
        pairs = list(zip(batch.groups, batch.staleness, strict=True))
        # Another reward may fail where the first one did not.
        for group, lag in pairs:
            if len(group.verified) < 2:
                self.consumed.drop(group, "error", group.min_policy_version + lag)
        trained = [(group, lag) for group, lag in pairs if len(group.verified) >= 2]
        groups, lags = [group for group, _ in trained], [lag for _, lag in trained]
        versions = [group.min_policy_version + lag for group, lag in trained]
        samples = samples_of(groups, self.stage.config.training.advantage, versions)
        if not samples:
            raise ReplayError(
                f"no group of the batch for version {self.trainer.policy_version + 1} has two scored rows"
            )
        with self.stage.busy("train"):
            report = self.trainer.step(samples)
        version = self.trainer.policy_version
        advantages = (sample.advantage for sample in samples)
        self.consumed.step(version, groups, advantages, report.trainer_logprobs, lags)
        self.rollouts += len(samples)
        self.tokens += sum(len(sample.response_tokens) for sample in samples)
        self._report(report)
        self._measure(report, groups, lags)

    def _measure(self, report: StepReport, groups: Sequence[ScoredGroup], lags: Sequence[int]) -> None:
        measures = step_measures(report, groups, lags)
        version = self.trainer.policy_version
        self.stage.progress(reward_mean=measures["reward_mean"], staleness_mean=measures["staleness_mean"])
        self.stage.metrics.log(incarnation=self.incarnation, policy_version=version, **measures)
        if version % 10 == 0:
            self.stage.milestone(f"version {version}: stored reward {measures['reward_mean']:.3f}")

    def _report(self, report: StepReport | None) -> None:
        self.stage.progress(
            now=report is None,
            policy_version=self.trainer.policy_version,
            incarnation=self.incarnation,
            max_steps=self.stop_at_step,
            rollouts=self.rollouts,
            tokens=self.tokens,
            step=None if report is None else report.measured(),
        )

    def _state(self) -> dict[str, Any]:
        return {"lineage": self.lineage.to_json(), "rollouts": self.rollouts, "tokens": self.tokens}

    def _checkpoint(self) -> None:
        with self.stage.busy("checkpoint"):
            self.consumed.flush()
            self.checkpoints.begin(self.trainer.policy_version, self.trainer.tensors(), self._state())
        self.checkpointed = self.trainer.policy_version


def start_from(trainer: Trainer, run: StoredRun, step: int) -> None:
    """Puts a stored run's checkpoint of version `step` into `trainer`: weights, optimizer and random state.

    Raises ReplayError where it has none, and StreamCorrupt where a file of it is damaged.
    """
    restore(trainer, run.store, run.checkpoint(step))


def open_sources(stage: Stage, spec: ReplaySpec) -> list[StoredRun]:
    """The stored runs; with the scores that this replay gave their trajectories, where it did."""
    scoring = stage.config.scoring
    own = Scores(store=stage.store, reward=scoring.reward, num_scorers=scoring.replicas)
    scores = own if spec.rescore else None
    return [StoredRun(open_store(source.url), scores=scores) for source in spec.sources]


def _read_ahead(runs: Sequence[StoredRun], plan: Sequence[Batch]) -> Iterator[StoredBatch]:
    """The batches, each read while the one before it is being trained on."""
    # Each source is read in one go, so that a part is opened once.
    groups = [run.read([row for batch in plan for of, row in batch if of == number]) for number, run in enumerate(runs)]
    staleness = [run.groups["staleness"].to_numpy() for run in runs]

    def read(batch: Batch) -> StoredBatch:
        return StoredBatch(
            groups=[next(groups[number]) for number, _ in batch],
            staleness=[int(staleness[number][row]) for number, row in batch],
        )

    with ThreadPoolExecutor(1, "read ahead") as thread:
        following = thread.submit(read, plan[0]) if plan else None
        for number in range(len(plan)):
            assert following is not None
            batch = following.result()
            if number + 1 < len(plan):
                following = thread.submit(read, plan[number + 1])
            yield batch
