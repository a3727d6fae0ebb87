"""The train stage: scored groups in, policy versions out.

    ║ trajectories ║ + ║ scores ║ ─► intake ─► fresh enough, and of a policy that still exists? ──no──► dropped, counted
                                                  │ yes
    ┌─► groups_per_step of them ─► advantages ─► trainer ─► version + 1 ─► handover ─► sync_weights
    │                                                │
    └──────── ledger balanced ◄──────────────────────┴─► every few steps: checkpoint (weights, optimizer, RNG,
                                                          stream cursors, account) in one commit

Consumes: trajectories zipped with their scores. Waits for: a step's worth of groups. Produces: policy versions and
checkpoints. What is taken between two steps counts only once the step is done, so a trainer that stops half-way has
taken nothing.
"""

import dataclasses
import time
from typing import Any

import torch

from configs.schema import RunConfig
from millrace.advantage import group_mean_advantages
from millrace.batch import Sample
from millrace.intake import Intake, ScoredGroup, committed
from millrace.ledger import Account, balance
from millrace.lineage import Lineage
from millrace.model import load_model, load_tokenizer, start_folder
from millrace.stages.process import Stage, run_stage
from millrace.staleness import staleness
from millrace.trainer import StepReport, Trainer
from millrace.weights.base import Weights, WeightsId, WeightsWriter
from millrace.weights.factory import trainer_end
from storage.checkpoints import Checkpoint, CheckpointWriter, load_file
from storage.store import Store


def main(stage: Stage) -> None:
    """Trains to `training.max_steps`, or until asked to drain; the last version is checkpointed either way."""
    config = stage.config
    torch.set_num_threads(config.training.threads)
    torch.manual_seed(config.seed)
    folder = start_folder(stage.store, config.model.path)
    load_tokenizer(folder)  # a folder without one is a mistake that the trainer should not be the last to find
    training = config.training
    trainer = Trainer(
        load_model(folder, config.model.dtype),
        learning_rate=training.learning_rate,
        weight_decay=training.weight_decay,
        max_grad_norm=training.max_grad_norm,
        max_importance_ratio=training.max_importance_ratio,
        max_tokens_per_microbatch=training.max_tokens_per_microbatch,
    )
    checkpoints = CheckpointWriter(stage.store)
    latest = checkpoints.latest
    if latest is not None:
        trainer.restore(latest.step, {name: load_file(stage.store, ref) for name, ref in latest.files.items()})
    handover = trainer_end(stage.arguments.handover, trainer.weights())
    stage.milestone(
        f"trainer ready at version {trainer.policy_version} of {training.max_steps}, "
        f"incarnation {checkpoints.incarnation}"
    )
    TrainLoop(stage, trainer, checkpoints, handover).run()
    stage.milestone(f"trainer stopped at version {trainer.policy_version}, checkpointed")


class TrainLoop:
    """The loop above."""

    def __init__(self, stage: Stage, trainer: Trainer, checkpoints: CheckpointWriter, handover: WeightsWriter) -> None:
        self.stage = stage
        self.trainer = trainer
        self.checkpoints = checkpoints
        self.handover = handover
        state: dict[str, Any] = {} if checkpoints.latest is None else checkpoints.latest.state
        self.lineage = Lineage.after(checkpoints.latest, checkpoints.incarnation)
        self.intake = open_intake(stage.store, stage.config, checkpoints.latest)
        self.committed = committed(
            stage.store,
            reward=stage.config.scoring.reward,
            num_generators=stage.config.generation.replicas,
            num_scorers=stage.config.scoring.replicas,
        )
        self.account = Account.from_json(state["account"]) if state else Account()
        # The groups of the step to come.
        self.groups: list[ScoredGroup] = []
        # As of the last finished step: what a checkpoint may hold.
        self.settled = self._settle()

    def run(self) -> None:
        """Until the last step, or until asked to drain."""
        training = self.stage.config.training
        self._hand_over()
        self._check_ledger()
        self._report(None)
        while self.trainer.policy_version < training.max_steps:
            if not self.stage.wait(self._collect, why="waiting for scored groups"):
                break
            self._step()
            if self.trainer.policy_version % training.checkpoint_every == 0:
                self._checkpoint()
        latest = self.checkpoints.latest
        if latest is None or latest.step != self.trainer.policy_version:
            self._checkpoint()

    def _collect(self) -> bool:
        """Takes what is scored; whether a step's worth of it may be trained on."""
        dropped_before = self.account.groups_dropped
        while len(self.groups) < self.stage.config.training.groups_per_step:
            group = self.intake.take()
            if group is None:
                break
            reason = self._drop_reason(group)
            if reason is None:
                self.groups.append(group)
            else:
                self._drop(group, reason)
        if self.account.groups_dropped != dropped_before:
            # Each dropped group makes room for another: the generators look for this.
            self.stage.progress(now=True, groups_dropped=self.account.groups_dropped)
        return len(self.groups) >= self.stage.config.training.groups_per_step

    def _drop_reason(self, group: ScoredGroup) -> str | None:
        if not self.lineage.holds(group.incarnation, group.max_policy_version):
            return "rolled_back"
        if staleness(self.trainer.policy_version, group.min_policy_version) > self.stage.config.effective_max_staleness:
            return "stale"
        if len(_verified(group)) < 2:
            return "error"
        return None

    def _drop(self, group: ScoredGroup, reason: str) -> None:
        rewards = (reward for reward in group.rewards if reward is not None)
        self.account.drop(reason, group.amount(), reward_sum=sum(rewards))
        self.account.groups_dropped += 1

    def _step(self) -> None:
        """One optimizer step on the groups taken; from here on they count as consumed."""
        # Arrival order varies from run to run; the order in the batch must not.
        groups = sorted(self.groups, key=lambda group: group.group_id)
        with self.stage.busy("train"):
            report = self.trainer.step([sample for group in groups for sample in _samples(group)])
        with self.stage.busy("handover"):
            self._hand_over()
        for group in groups:
            self._account_for(group)
        self.groups = []
        self._check_ledger()
        self.settled = self._settle()
        self._report(report)
        self._measure(report, groups)

    def _account_for(self, group: ScoredGroup) -> None:
        account, verified = self.account, _verified(group)
        account.train(
            group.amount(verified),
            staleness=staleness(self.trainer.policy_version - 1, group.min_policy_version),
            reward_sum=sum(group.rewards[i] or 0.0 for i in verified),
        )
        failed = [i for i in range(len(group.rewards)) if i not in verified]
        if failed:
            account.drop("error", group.amount(failed), reward_sum=0.0)

    def _hand_over(self) -> None:
        weights_id = WeightsId(
            incarnation=self.checkpoints.incarnation,
            policy_version=self.trainer.policy_version,
            t_offered=time.time(),
        )
        self.handover.offer(Weights(id=weights_id, tensors=self.trainer.weights()))

    def _settle(self) -> dict[str, Any]:
        return {"account": self.account.to_json(), "intake": self.intake.state(), "lineage": self.lineage.to_json()}

    def _check_ledger(self) -> None:
        generated, scored = self.committed.look()
        balance(generated=generated, scored=scored, consumed=self.intake.consumed(), account=self.account)

    def _checkpoint(self) -> None:
        with self.stage.busy("checkpoint"):
            self.checkpoints.commit(self.trainer.policy_version, self.trainer.state(), self.settled)

    def _report(self, report: StepReport | None) -> None:
        self.stage.progress(
            now=True,
            policy_version=self.trainer.policy_version,
            incarnation=self.checkpoints.incarnation,
            max_steps=self.stage.config.training.max_steps,
            groups_dropped=self.account.groups_dropped,
            rollouts=self.account.trained.rollouts,
            tokens=self.account.trained.tokens,
            consumed=self.intake.consumed().to_json(),
            account=self.settled["account"],
            step=None if report is None else dataclasses.asdict(report),
        )

    def _measure(self, report: StepReport, groups: list[ScoredGroup]) -> None:
        version = self.trainer.policy_version
        rewards = [reward for group in groups for reward in group.rewards if reward is not None]
        lags = [staleness(version - 1, group.min_policy_version) for group in groups]
        lengths = [len(tokens) for group in groups for tokens in group.response_tokens]
        reward_mean = sum(rewards) / len(rewards)
        self.stage.progress(reward_mean=reward_mean, staleness_mean=sum(lags) / len(lags))
        self.stage.metrics.log(
            incarnation=self.checkpoints.incarnation,
            policy_version=version,
            reward_mean=reward_mean,
            staleness_mean=sum(lags) / len(lags),
            staleness_max=max(lags),
            response_length_mean_tokens=sum(lengths) / len(lengths),
            **dataclasses.asdict(report),
        )
        if version % 10 == 0:
            self.stage.milestone(f"version {version}: reward {reward_mean:.3f}, staleness {min(lags)}–{max(lags)}")


def open_intake(store: Store, config: RunConfig, checkpoint: Checkpoint | None) -> Intake:
    """The run's streams, from where `checkpoint` left them or from their beginning."""
    return Intake(
        store,
        reward=config.scoring.reward,
        num_generators=config.generation.replicas,
        num_scorers=config.scoring.replicas,
        state=None if checkpoint is None else checkpoint.state["intake"],
    )


def _verified(group: ScoredGroup) -> list[int]:
    """Members whose verifier came to a result. A failed reward is an error, not a 0."""
    return [i for i, reward in enumerate(group.rewards) if reward is not None]


def _samples(group: ScoredGroup) -> list[Sample]:
    verified = _verified(group)
    advantages = group_mean_advantages([reward for reward in group.rewards if reward is not None])
    return [
        Sample(
            prompt_tokens=group.prompt_tokens[i],
            response_tokens=group.response_tokens[i],
            rollout_logprobs=group.rollout_logprobs[i],
            loss_mask=group.loss_mask[i],
            temperature=group.temperature,
            advantage=advantage,
        )
        for i, advantage in zip(verified, advantages, strict=True)
    ]


if __name__ == "__main__":
    run_stage("train", main)
