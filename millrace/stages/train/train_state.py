"""State shared by both train loops: the run's checkpoints, the record of consumed groups, and the stage's metrics.

newest readable checkpoint ─► trainer ─► step ─► ║ consumed ║ + ║ trainer_logprobs ║
                                          └─► every `checkpoint_every` steps or `checkpoint_minutes`: checkpoint,
                                              written in the background; then old ones may be removed
"""

import time
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Any

from configs.schema import RunConfig
from millrace.maintenance.gc import carry_out, plan_checkpoints
from millrace.models.compiler import missing_for_compilation
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.decisions import Decisions, rolled_back
from millrace.runtime.metrics import Pace, extend_curve, extend_recent
from millrace.runtime.stage import Stage
from millrace.training.checkpoints.saving import AsyncCheckpoints
from millrace.training.parallel.leader import checkpoints_of, restore
from millrace.training.step_report import StepReport, group_measures
from millrace.training.trainer import Trainer
from storage.checkpoints import Checkpoint, CheckpointWriter, checkpoints_backwards
from storage.errors import StreamCorrupt


@dataclass(kw_only=True)
class TrainState:
    """The trainer and everything that it writes."""

    stage: Stage
    trainer: Trainer
    writer: CheckpointWriter
    checkpoints: AsyncCheckpoints
    consumed: ConsumedWriter
    decisions: Decisions
    restored_from: Checkpoint | None
    """The checkpoint that `trainer` was restored from, None for the start model."""

    def __post_init__(self) -> None:
        self.incarnation = self.writer.incarnation
        self.lineage = Lineage.after(self.restored_from, self.incarnation)
        self._pace = Pace()
        # Version of the last checkpoint begun; it may not be committed yet.
        self._saved: int | None = None
        self._t_saved = time.monotonic()

    def adopt(self, state: dict[str, Any]) -> None:
        """Commits the restored checkpoint once more, under this incarnation and with `state`."""
        if self.restored_from is not None:
            self._saved = self.writer.adopt(self.restored_from, state).step

    def save_if_due(self, state: dict[str, Any], *, evaluate_every: int | None = None) -> None:
        """Begins a checkpoint, which holds `state`, if one is due by `training` or the version will be evaluated."""
        version, training = self.trainer.policy_version, self.stage.config.training
        evaluated = evaluate_every is not None and version % evaluate_every == 0
        late = time.monotonic() - self._t_saved >= 60 * training.checkpoint_minutes
        if evaluated or late or version % training.checkpoint_every == 0:
            self._save(state)

    def finish(self, state: dict[str, Any]) -> None:
        """Checkpoints the trainer's version, and waits until it is durable."""
        if self._saved != self.trainer.policy_version:
            self._save(state)
        with self.stage.busy("checkpoint"):
            self.checkpoints.finish()

    def publish(self, report: StepReport | None, *, now: bool, **progress: Any) -> None:
        """Writes version and step report into the status record, with `progress` of the loop."""
        self.stage.update_status(
            now=now,
            policy_version=self.trainer.policy_version,
            incarnation=self.incarnation,
            step=None if report is None else report.measured(),
            **progress,
        )

    def measure(
        self, report: StepReport, groups: Sequence[ScoredGroup], lags: Sequence[int], **metrics: float
    ) -> dict[str, float]:
        """Logs the measures of a step together with `metrics` of the loop. Returns the step's measures.

        In a run with several sources, those of the groups of one are named `<measure>/<source>`.
        """
        measures = report.measures(groups, lags)
        for source in mixed_sources(self.stage.config):
            chosen = [(group, lag) for group, lag in zip(groups, lags, strict=True) if group.source == source]
            of_source: dict[str, float] = {"groups_trained": len(chosen)}
            if chosen:
                of_source |= group_measures([group for group, _ in chosen], [lag for _, lag in chosen])
            measures |= {f"{name}/{source}": value for name, value in of_source.items()}
        pace: dict[str, Any] = self._pace.step(measures["tokens"])
        version, reward = self.trainer.policy_version, measures["reward_mean"]
        self.stage.update_status(
            reward_mean=reward,
            reward_curve=extend_curve(self.stage.reward_curve, version, reward),
            recent=extend_recent(self.stage.recent, measures),
            **pace,
        )
        metrics["compiled"] = self.trainer.compiles
        self.stage.metrics.log(incarnation=self.incarnation, policy_version=version, **metrics, **measures)
        return measures

    def _save(self, state: dict[str, Any]) -> None:
        with self.stage.busy("checkpoint"):
            # The rows that the checkpoint's account counts must be durable first.
            self.consumed.flush()
            self.checkpoints.begin(self.trainer.policy_version, self.trainer.tensors(), state)
        self._saved = self.trainer.policy_version
        self._t_saved = time.monotonic()


def mixed_sources(config: RunConfig) -> list[str]:
    """The sources of a run that has several; empty for one."""
    return list(config.sources) if len(config.sources) > 1 else []


@contextmanager
def open_train_state(stage: Stage, trainer: Trainer) -> Iterator[TrainState]:
    """Fences older trainers of the run, and restores the newest readable checkpoint. On exit everything is durable."""
    writer = CheckpointWriter(stage.store)
    trainer.on_progress = stage.advance
    decisions = Decisions(stage.store)
    with (
        checkpoints_of(trainer, stage.store, writer) as checkpoints,
        closing(ConsumedWriter(stage.store, writer.incarnation)) as consumed,
    ):
        checkpoints.on_progress = stage.advance
        checkpoints.on_saved = lambda step: stage.emit_event("checkpoint.saved", policy_version=step)
        if (keep := stage.config.training.checkpoint_keep) is not None:
            checkpoints.after_commit = lambda: carry_out(stage.store, plan_checkpoints(stage.store, keep))
        restored_from = _restore_newest(stage, trainer, decisions)
        _report_rollback(stage, trainer)
        if stage.config.training.compile and not trainer.compiles:
            missing = missing_for_compilation(trainer.ranks.device.type) or "no compiler on another host of the trainer"
            sentence = f"the trainer runs uncompiled, which is slower: {missing} (apt-get install g++ python3-dev)"
            stage.emit_event("trainer.uncompiled", sentence=sentence)
            stage.log(sentence)
        yield TrainState(
            stage=stage,
            trainer=trainer,
            writer=writer,
            checkpoints=checkpoints,
            consumed=consumed,
            decisions=decisions,
            restored_from=restored_from,
        )


def _report_rollback(stage: Stage, trainer: Trainer) -> None:
    """Reports the predecessor's steps since its last checkpoint, which this trainer repeats."""
    lost = stage.value("policy_version") - trainer.policy_version
    if lost > 0:
        sentence = (
            f"the trainer went back from version {stage.value('policy_version')} to {trainer.policy_version}, its last "
            f"checkpoint: {lost} {'step is' if lost == 1 else 'steps are'} trained again"
        )
        stage.emit_event("trainer.rolled-back", steps=lost, policy_version=trainer.policy_version, sentence=sentence)
        stage.log(sentence)


def _restore_newest(stage: Stage, trainer: Trainer, decisions: Decisions) -> Checkpoint | None:
    """Restores and returns the newest readable checkpoint that was not rolled back; None if the run has none yet.

    Raises the newest checkpoint's StreamCorrupt if none of them can be read.
    """
    damage: StreamCorrupt | None = None
    for checkpoint in checkpoints_backwards(stage.store):
        if rolled_back(decisions.all, checkpoint.incarnation, checkpoint.step):
            continue
        try:
            restore(trainer, stage.store, checkpoint)
        except StreamCorrupt as error:
            stage.log(f"checkpoint of version {checkpoint.step} set aside, going back to the one before: {error}")
            damage = damage or error
            continue
        return checkpoint
    if damage is not None:
        raise damage
    return None
