"""The train stage of a campaign: scored groups in, policy versions out.

    ║ trajectories ║ + ║ scores ║ ─► intake ─► readable? of a policy that still exists? fresh? ──no──► dropped, counted
                                                  │ yes
    ┌─► groups_per_step of them ─► advantages ─► trainer ─► version + 1 ─► handover ─► sync_weights
    │                                                │
    │                                                ├─► ║ consumed ║ + ║ trainer_logprobs ║ what became of each
    └──────── ledger balanced ◄──────────────────────┴─► every few steps: checkpoint (weights, optimizer, RNG,
                                                          stream cursors, account) in one commit, made while training
                                                          goes on

Consumes: trajectories zipped with their scores. Waits for: a step's worth of groups. Produces: policy versions,
checkpoints, and the record of what it took. What is taken between two steps counts only once the step is done, so a
trainer that stops half-way has taken nothing. A trainer that starts from a checkpoint commits it once more as its own,
so that generators can tell from the log which of their groups it will refuse. Where it shares its device with them, it
sleeps from the hand-over of a version until a step's worth of groups is there (`millrace/device.py`).
"""

import math
import time
from typing import Any

from millrace.checkpointing.saving import AsyncCheckpoints
from millrace.committed import committed
from millrace.consumed import ConsumedWriter
from millrace.intake import Intake
from millrace.ledger import Account, Amount, balance
from millrace.lineage import Lineage
from millrace.position import Positions
from millrace.probe import NUM_LOGPROBS
from millrace.samples import samples_of
from millrace.scored import LostPart, ScoredGroup
from millrace.stages.measures import step_measures
from millrace.stages.process import Stage
from millrace.stages.turns import Turns
from millrace.staleness import staleness
from millrace.step_report import StepReport
from millrace.trainer import Trainer
from millrace.weights.base import Manifest, Probe, Weights, WeightsId, WeightsWriter
from storage.checkpoints import Checkpoint, CheckpointWriter
from storage.failpoints import failpoint

_STALE_SECONDS = 60.0
"""Least time between two events that rollouts were dropped as stale."""


class TrainLoop:
    """The loop above.

    `found` is the checkpoint that `trainer` was restored from, None for the base model; `probed` are the tokens by
    which generators check that they mean the same policy; `stop_at_step` is the policy version to end with.
    """

    def __init__(
        self,
        stage: Stage,
        trainer: Trainer,
        turns: Turns,
        writer: CheckpointWriter,
        checkpoints: AsyncCheckpoints,
        consumed: ConsumedWriter,
        handover: WeightsWriter,
        probed: tuple[int, ...],
        found: Checkpoint | None,
        stop_at_step: int,
    ) -> None:
        self.stage = stage
        self.trainer = trainer
        self.turns = turns
        self.incarnation = writer.incarnation
        self.checkpoints = checkpoints
        self.consumed = consumed
        self.handover = handover
        self.probed = probed
        self.stop_at_step = stop_at_step
        state: dict[str, Any] = {} if found is None else found.state
        self.lineage = Lineage.after(found, writer.incarnation)
        self.intake = open_intake(stage, trainer.vocab_size, state.get("intake"))
        self.positions = Positions(stage.config.generation.replicas, state.get("due"))
        self.committed = committed(
            stage.store,
            reward=stage.config.scoring.reward,
            num_generators=stage.config.generation.replicas,
            num_scorers=stage.config.scoring.replicas,
        )
        self.account = Account.from_json(state["account"]) if state else Account()
        # How far the cursors stood when this trainer last found the ledger right.
        self.balanced: list[Amount] = []
        # Rollouts dropped as stale that no event has told of, and when the last one did.
        self.stale_untold, self.t_stale_told = 0, -math.inf
        # The groups of the step to come.
        self.groups: list[ScoredGroup] = []
        # As of the last finished step: what a checkpoint may hold.
        self.settled = self._settle()
        # The version of the checkpoint taken last; on its way, or there.
        self.checkpointed: int | None = None
        if found is not None:
            self.checkpointed = writer.adopt(found, self.settled).step

    def run(self) -> None:
        """Until the last step, or until asked to drain."""
        checkpoint_every = self.stage.config.training.checkpoint_every
        self._check_ledger()
        self._hand_over()
        self.turns.end()
        self._report(None)
        while self.trainer.policy_version < self.stop_at_step:
            if not self.stage.wait(self._collect, why="waiting for scored groups"):
                break
            if not self.stage.wait(self.turns.begin, why="waiting for generators to give the device back"):
                break
            self._step()
            if self.trainer.policy_version % checkpoint_every == 0:
                self._checkpoint()
        if self.checkpointed != self.trainer.policy_version:
            self._checkpoint()
        with self.stage.busy("checkpoint"):
            self.checkpoints.finish()

    def _collect(self) -> bool:
        """Takes what is scored; whether a step's worth of it may be trained on."""
        self.checkpoints.check()
        dropped_before = self.account.groups_dropped
        while len(self.groups) < self.stage.config.training.groups_per_step:
            group = self.intake.take()
            if group is None:
                break
            if isinstance(group, LostPart):
                self._set_aside(group)
            else:
                self._sort(group)
        if self.account.groups_dropped != dropped_before:
            # Each dropped group makes room for another: the generators look for this.
            self.stage.progress(now=True, groups_dropped=self.account.groups_dropped)
        return len(self.groups) >= self.stage.config.training.groups_per_step

    def _sort(self, group: ScoredGroup) -> None:
        """To be trained on, or dropped."""
        if not self.lineage.holds(group.incarnation, group.part_max_policy_version):
            # Its generator makes it once more, under weights that exist: so it frees no room for another.
            self._drop(group, "rolled_back")
            return
        self.positions.pass_group(group)
        if staleness(self.trainer.policy_version, group.min_policy_version) > self.stage.config.effective_max_staleness:
            self._drop(group, "stale")
        elif len(group.verified) < 2:
            self._drop(group, "error")
        else:
            self.groups.append(group)
            return
        self.account.groups_dropped += 1

    def _drop(self, group: ScoredGroup, reason: str) -> None:
        if reason == "stale":
            self._tell_stale(len(group.rewards))
        rewards = (reward for reward in group.rewards if reward is not None)
        self.consumed.drop(group, reason, self.trainer.policy_version)
        self.account.drop(reason, group.amount(), generator=group.generator, reward_sum=sum(rewards))

    def _tell_stale(self, rollouts: int) -> None:
        self.stale_untold += rollouts
        if time.monotonic() - self.t_stale_told >= _STALE_SECONDS:
            self.stage.tell("staleness.bound-hit", rollouts_dropped=self.stale_untold)
            self.stale_untold, self.t_stale_told = 0, time.monotonic()

    def _set_aside(self, part: LostPart) -> None:
        """A damaged part costs its own rollouts and nothing else."""
        self.stage.milestone(f"set aside {part.left.rollouts} rollouts: {part.reason}")
        exists = self.lineage.holds(part.record.incarnation, part.record.max_policy_version)
        reason = "corrupt" if exists else "rolled_back"
        self.consumed.drop(part, reason, self.trainer.policy_version)
        self.account.drop(reason, part.left, generator=part.generator, reward_sum=0.0)
        if exists:
            num_groups = part.left.rollouts // self.stage.config.generation.group_size
            self.positions.pass_lost(part, num_groups)
            self.account.groups_dropped += num_groups

    def _step(self) -> None:
        """One optimizer step on the groups taken; from here on they count as consumed."""
        # Arrival order varies from run to run; the order in the batch must not.
        groups = sorted(self.groups, key=lambda group: group.group_id)
        samples = samples_of(groups, self.stage.config.training.advantage, self.trainer.policy_version)
        with self.stage.busy("train"):
            report = self.trainer.step(samples)
        failpoint("train.before_handover")
        with self.stage.busy("handover"):
            self._hand_over()
        # As soon as that: generators wait for it.
        self.turns.end()
        failpoint("train.after_handover")
        for group in groups:
            self._account_for(group)
        advantages = (sample.advantage for sample in samples)
        self.consumed.step(self.trainer.policy_version, groups, advantages, report.trainer_logprobs)
        self.groups = []
        self._check_ledger()
        self.settled = self._settle()
        self._report(report)
        self._measure(report, groups)

    def _account_for(self, group: ScoredGroup) -> None:
        account, verified = self.account, group.verified
        account.train(
            group.amount(verified),
            generator=group.generator,
            staleness=staleness(self.trainer.policy_version - 1, group.min_policy_version),
            reward_sum=sum(group.rewards[i] or 0.0 for i in verified),
        )
        failed = [i for i in range(len(group.rewards)) if i not in verified]
        if failed:
            account.drop("error", group.amount(failed), generator=group.generator, reward_sum=0.0)

    def _hand_over(self) -> None:
        weights_id = WeightsId(
            incarnation=self.incarnation,
            policy_version=self.trainer.policy_version,
            t_offered=time.time(),
        )
        probe = Probe(tokens=self.probed, logprobs=self.trainer.next_logprobs(self.probed, NUM_LOGPROBS))
        manifest = Manifest(id=weights_id, probe=probe)
        self.handover.offer(Weights(manifest=manifest, tensors=self.trainer.weights()))

    def _settle(self) -> dict[str, Any]:
        return {
            "account": self.account.to_json(),
            "intake": self.intake.state(),
            "due": list(self.positions.due),
            "lineage": self.lineage.to_json(),
        }

    def _check_ledger(self) -> None:
        generated, scored = self.committed.look()
        consumed = self.intake.consumed()
        self.ledger = balance(
            generated=generated, scored=scored, consumed=consumed, account=self.account, balanced=self.balanced
        )
        self.balanced = consumed

    def _checkpoint(self) -> None:
        with self.stage.busy("checkpoint"):
            # What the account counts has to be told there, row by row, before the account is.
            self.consumed.flush()
            self.checkpoints.begin(self.trainer.policy_version, self.trainer.tensors(), self.settled)
        self.checkpointed = self.trainer.policy_version

    def _report(self, report: StepReport | None) -> None:
        self.stage.progress(
            now=True,
            policy_version=self.trainer.policy_version,
            incarnation=self.incarnation,
            max_steps=self.stage.config.training.max_steps,
            groups_dropped=self.account.groups_dropped,
            rollouts=self.account.trained.rollouts,
            tokens=self.account.trained.tokens,
            consumed=[amount.to_json() for amount in self.intake.consumed()],
            account=self.settled["account"],
            step=None if report is None else report.measured(),
        )

    def _measure(self, report: StepReport, groups: list[ScoredGroup]) -> None:
        version = self.trainer.policy_version
        lags = [staleness(version - 1, group.min_policy_version) for group in groups]
        measures = step_measures(report, groups, lags)
        self.stage.progress(reward_mean=measures["reward_mean"], staleness_mean=measures["staleness_mean"])
        self.stage.metrics.log(
            incarnation=self.incarnation,
            policy_version=version,
            buffered_rollouts=self.ledger.buffered.rollouts,
            in_flight_rollouts=self.ledger.in_flight.rollouts,
            **measures,
        )
        if version % 10 == 0:
            reward = measures["reward_mean"]
            self.stage.milestone(f"version {version}: reward {reward:.3f}, staleness {min(lags)}–{max(lags)}")


def open_intake(stage: Stage, vocab_size: int, state: list[dict[str, Any]] | None) -> Intake:
    """The run's streams, from where a checkpoint left them or from their beginning."""
    config = stage.config
    return Intake(
        stage.store,
        reward=config.scoring.reward,
        num_generators=config.generation.replicas,
        num_scorers=config.scoring.replicas,
        vocab_size=vocab_size,
        state=state,
    )
