"""The train loop of a replay: the batches of stored runs in, policy versions out. It waits for no other stage.

    ║ consumed ║ of each source ─► plan: batches ─► next batch ─► trainer ─► version + 1
                                                                     ├─► ║ consumed ║ + ║ trainer_logprobs ║
                                                                     └─► every few steps: checkpoint

Writes `consumed`, `trainer_logprobs`, metrics and checkpoints as a campaign's trainer does, but keeps no ledger and
hands no version over. Batch i makes version `start_step + i + 1`, so a checkpoint's version says where to continue.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

from configs.requests import ReplayRequest
from millrace.errors import ReplayError
from millrace.replay.parts import Scores
from millrace.replay.selection import Batch, plan
from millrace.replay.source_run import SourceRun
from millrace.rollouts.masking import mask_truncated
from millrace.rollouts.scored_group import ScoredGroup
from millrace.rollouts.shaping import SpreadFilter
from millrace.stages.train.train_state import TrainState
from millrace.training.parallel.leader import restore
from millrace.training.samples import samples_of
from millrace.training.step_report import StepReport
from storage.stores.factory import open_store

StoredBatch = list[tuple[ScoredGroup, int]]
"""The groups of a step in the order of the batch, each with the version of the source's trainer that took it."""


class ReplayLoop:
    """Trains on stored batches, as the picture of this module shows.

    A replay starts from `spec.start_step` of the first source, or continues from its checkpoint.
    """

    def __init__(self, state: TrainState, spec: ReplayRequest) -> None:
        self.state, self.stage, self.trainer = state, state.stage, state.trainer
        scores = Scores.of(self.stage.store) if spec.rescore else None
        runs = [SourceRun(open_store(source), scores=scores) for source in spec.sources]
        first = spec.start_step or 0
        if state.restored_from is None and spec.start_step is not None:
            restore(self.trainer, runs[0].store, runs[0].checkpoint(spec.start_step))
        training = self.stage.config.training
        self.selection = training.selection
        self.spread = SpreadFilter(training.selection, training.groups_per_step)
        batches = plan(runs, spec, groups_per_step=training.groups_per_step, seed=self.stage.config.seed)
        self.stop_at_step = min(training.max_steps, first + len(batches))
        self.batches = _read(runs, batches[self.trainer.policy_version - first : self.stop_at_step - first])
        self.stage.mark_ready(
            f"trainer ready at version {self.trainer.policy_version} of {self.stop_at_step}, on stored trajectories"
        )
        self.rollouts = self.tokens = 0
        if state.restored_from is not None:
            self.rollouts, self.tokens = state.restored_from.state["rollouts"], state.restored_from.state["tokens"]
        state.adopt(self._checkpoint_state())

    def run(self) -> None:
        """Runs until the plan is done, or until asked to drain."""
        self._publish(None)
        while self.trainer.policy_version < self.stop_at_step and not self.stage.draining:
            self.state.checkpoints.check()
            with self.stage.busy("loading"):
                batch = next(self.batches)
            self._step(batch)
            self.state.save_if_due(self._checkpoint_state())
        self.state.finish(self._checkpoint_state())

    def _step(self, batch: StoredBatch) -> None:
        trained = self._selected(batch)
        groups, versions = [group for group, _ in trained], [taken_at for _, taken_at in trained]
        lags = [group.staleness(taken_at) for group, taken_at in trained]
        samples = samples_of(groups, self.stage.config.training, versions, self.stage.config.trainings())
        with self.stage.busy("train"):
            report = self.trainer.step(samples)
        version = self.trainer.policy_version
        advantages = (sample.advantage for sample in samples)
        self.state.consumed.step(
            version, groups, advantages, report.trainer_logprobs, report.trainer_entropies, trainer_versions=versions
        )
        self.rollouts += len(samples)
        self.tokens += sum(len(sample.response_tokens) for sample in samples)
        self._publish(report)
        measures = self.state.measure(report, groups, lags)
        if version % 10 == 0:
            self.stage.log(f"version {version}: stored reward {measures['reward_mean']:.3f}")

    def _selected(self, batch: StoredBatch) -> StoredBatch:
        """Returns the groups to train, and drops the others. Raises ReplayError if all are dropped."""
        masked = [(mask_truncated(group, self.selection), taken_at) for group, taken_at in batch]
        trained: StoredBatch = []
        reasons: Counter[str] = Counter()
        for group, taken_at in masked:
            # With another reward than the source's, scoring may fail, or give all members of the group the same reward.
            reason = group.drop_reason or self.spread.drop_reason(group)
            if reason is None:
                trained.append((group, taken_at))
            else:
                self.state.consumed.drop(group, reason, taken_at)
                reasons[reason] += 1
        if not trained:
            why = ", ".join(f"{count} {reason}" for reason, count in sorted(reasons.items()))
            raise ReplayError(
                f"no group of the batch for version {self.trainer.policy_version + 1} can be trained on: {why}"
            )
        return trained

    def _publish(self, report: StepReport | None) -> None:
        self.state.publish(
            report, now=report is None, max_steps=self.stop_at_step, rollouts=self.rollouts, tokens=self.tokens
        )

    def _checkpoint_state(self) -> dict[str, Any]:
        return {"lineage": self.state.lineage.to_json(), "rollouts": self.rollouts, "tokens": self.tokens}


def _read(runs: Sequence[SourceRun], batches: Sequence[Batch]) -> Iterator[StoredBatch]:
    """Yields the batches, in one pass over each source: each part is opened once."""
    flat = [group for batch in batches for group in batch]
    groups = [run.read([row for source, row in flat if source == number]) for number, run in enumerate(runs)]
    steps = [run.groups["step"].to_numpy() for run in runs]
    for batch in batches:
        yield [(next(groups[number]), int(steps[number][row]) - 1) for number, row in batch]
