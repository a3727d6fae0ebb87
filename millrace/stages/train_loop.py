"""The train loop of a campaign: scored groups in, policy versions out.

    ║ trajectories ║ + ║ scores ║ ─► loader ─► readable? policy still exists? fresh? selected? ──no──► dropped, counted
                                                  │ yes
    ┌─► groups_per_step of them ─► advantages ─► trainer ─► version + 1 ─► handover ─► sync_weights
    │                                                │
    │                                                ├─► ║ consumed ║ + ║ trainer_logprobs ║ outcome of each
    └──────── ledger balanced ◄──────────────────────┴─► every few steps: checkpoint (weights, optimizer, RNG,
                                                          stream cursors, account) in one commit, made while training
                                                          goes on

Reads trajectories joined with their scores, and waits for a step's worth of groups. Writes policy versions, checkpoints
and the record of consumed groups. Groups taken between two steps count only once the step is done: a trainer that dies
half-way has consumed nothing. A trainer that starts from a checkpoint commits it again as its own, so that generators
can tell from the log which of their groups it will refuse. If it shares its device with them, it sleeps from the
hand-over of a version until a step's worth of groups is there (`millrace/runtime/device_sharing.py`).
"""

import math
import time
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from millrace.evaluation.early_stop import read_early_stop, stop_if_no_better
from millrace.rollouts.ledger import Account, Amount, CommittedAmounts, balance
from millrace.rollouts.length_bias import LengthBias
from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.masking import mask_too_old
from millrace.rollouts.overtaking import Overtaking
from millrace.rollouts.scored_group import LostPart, ScoredGroup
from millrace.rollouts.stragglers import Stragglers
from millrace.runtime.device_sharing import DeviceTurns
from millrace.selection.spread import ZERO_ADVANTAGE, SpreadFilter
from millrace.selection.truncation import mask_truncated
from millrace.stages.train_state import TrainState
from millrace.training.handover import Handover
from millrace.training.samples import samples_of
from millrace.training.step_report import StepReport
from millrace.weights.base import Manifest, Probe, WeightsId
from millrace.weights.probe import NUM_LOGPROBS
from storage.failpoints import failpoint

_STALE_SECONDS = 60.0
"""Minimum time between two events about rollouts dropped as stale."""


class TrainLoop:
    """The loop above.

    Generators use the log-probabilities of `probed` tokens to check that they hold the same policy. `stop_at_step` is
    the policy version to end with.
    """

    def __init__(
        self,
        state: TrainState,
        turns: DeviceTurns,
        handover: Handover,
        probed: tuple[int, ...],
        stop_at_step: int,
    ) -> None:
        self.state, self.stage, self.trainer = state, state.stage, state.trainer
        self.config = state.stage.config
        self.consumed, self.lineage = state.consumed, state.lineage
        self.turns = turns
        self.handover = handover
        self.probed = probed
        self.stop_at_step = stop_at_step
        found: dict[str, Any] = {} if state.found is None else state.found.state
        streams: dict[str, Any] = {
            "reward": self.config.scoring.reward,
            "num_generators": self.config.generation.replicas,
            "num_scorers": self.config.scoring.replicas,
        }
        self.loader = RolloutLoader(
            self.stage.store,
            vocab_size=self.trainer.vocab_size,
            lineage=self.lineage,
            state=found.get("intake"),
            **streams,
        )
        self.stragglers = Stragglers(
            self.stage.store,
            self.loader,
            num_generators=self.config.generation.replicas,
            max_staleness=self.config.effective_max_staleness,
            silent_seconds=self.config.supervision.hang_seconds,
        )
        self.committed = CommittedAmounts(self.stage.store, **streams)
        self.account = Account.from_json(found["account"]) if found else Account()
        # Position of the cursors when the ledger was last found balanced.
        self.balanced: list[Amount] = []
        # Rollouts dropped as stale since the last event about them, and the time of that event.
        self.stale_rollouts, self.t_stale_event = 0, -math.inf
        self.length_bias = LengthBias()
        self.selection = self.config.training.selection
        self.spread = SpreadFilter(self.selection, self.config.training.groups_per_step)
        # Groups of the next step, and how many later ones had been taken before each.
        self.groups: list[ScoredGroup] = []
        self.overtaken: list[int] = []
        self.overtaking = Overtaking(self.config.generation.replicas)
        # As of the last finished step: what a checkpoint may hold.
        self.settled = self._settle()
        state.adopt(self.settled)

    def run(self) -> None:
        """Until the last step, until evaluations no longer get better, or until asked to drain."""
        self._check_ledger()
        # Before generators get the weights: by the count of a predecessor that dropped more, they would admit more.
        self.stage.progress(now=True, groups_dropped=self.account.groups_dropped)
        self._hand_over()
        self.turns.end()
        self._publish(None)
        if self.config.evaluation.stop_after is not None:
            # An earlier attempt may have evaluated enough.
            stop_if_no_better(self.stage.store, self.stage.arguments.attempt, self.config.evaluation.stop_after)
        while self.trainer.policy_version < self.stop_at_step and not self._stops_early():
            if not self.stage.wait(self._stragglers_in, why="waiting for groups that the step would leave too old"):
                break
            if not self.stage.wait(self._collect, why="waiting for scored groups"):
                break
            if not self.stage.wait(self.turns.begin, why="waiting for generators to give the device back"):
                break
            self._step()
            self.state.save_if_due(self.settled, evaluate_every=self.config.evaluation.every)
        self.state.finish(self.settled)

    def _stops_early(self) -> bool:
        if self.config.evaluation.stop_after is None:
            return False
        stop = read_early_stop(self.stage.store, self.stage.arguments.attempt)
        if stop is not None:
            self.stage.milestone(f"training ends early at version {self.trainer.policy_version}: {stop.sentence}")
        return stop is not None

    def _tend(self) -> None:
        """What goes on beside the steps. Raises what went wrong with a checkpoint."""
        self.state.checkpoints.check()
        self.handover.tend()
        if self.handover.is_wanted_again() and self.turns.begin():
            self.stage.milestone(f"version {self.trainer.policy_version} is handed over once more")
            self._hand_over()
            self.turns.end()

    def _stragglers_in(self) -> bool:
        self._tend()
        # In sync mode nothing is ever too old.
        waits = self.config.staleness.too_old == "wait" and self.config.pipeline.mode == "async"
        return not waits or self.stragglers.are_in(self.trainer.policy_version)

    def _collect(self) -> bool:
        """Takes scored groups; returns whether there are enough for a step."""
        self._tend()
        dropped_before = self.account.groups_dropped
        while len(self.groups) < self.config.training.groups_per_step:
            group = self.loader.take()
            if group is None:
                break
            if isinstance(group, LostPart):
                self._set_aside(group)
            else:
                self._keep_or_drop(group)
        if self.account.groups_dropped != dropped_before:
            # Generators read the count: each dropped group makes room for another.
            self.stage.progress(
                now=True, groups_dropped=self.account.groups_dropped, zero_advantage_share=self.spread.share
            )
        return len(self.groups) >= self.config.training.groups_per_step

    def _keep_or_drop(self, group: ScoredGroup) -> None:
        if not self.lineage.holds(group.incarnation, group.part_max_policy_version):
            # Its generator makes it again under weights that exist, so it makes no room for another.
            self._drop(group, "rolled_back")
            return
        overtaken = self.overtaking.take(group.group_id)
        version, bound = self.trainer.policy_version, self.config.effective_max_staleness
        group = mask_truncated(group, self.selection)
        if self.config.staleness.too_old == "mask":
            group = mask_too_old(group, version, bound)
        reason = "stale" if group.staleness(version) > bound else group.drop_reason or self.spread.drop_reason(group)
        if reason is None:
            self.groups.append(group)
            self.overtaken.append(overtaken)
            return
        self._drop(group, reason)
        self.account.groups_dropped += 1
        if reason == "stale":
            self._publish_stale(len(group.rewards))
        elif reason == ZERO_ADVANTAGE and (sentence := self.spread.starving()) is not None:
            self.stage.tell("selection.starving", zero_advantage_share=self.spread.share, sentence=sentence)
            self.stage.milestone(sentence)

    def _drop(self, group: ScoredGroup | LostPart, reason: str) -> None:
        reward_sum = _reward_sum(group, group.verified) if isinstance(group, ScoredGroup) else 0.0
        self.consumed.drop(group, reason, self.trainer.policy_version)
        if reason not in ("rolled_back", ZERO_ADVANTAGE):
            self.length_bias.take(group)
        self.account.drop(reason, group.amount(), generator=group.generator, reward_sum=reward_sum)

    def _publish_stale(self, rollouts: int) -> None:
        self.stale_rollouts += rollouts
        if time.monotonic() - self.t_stale_event >= _STALE_SECONDS:
            self.stage.tell("staleness.bound-hit", rollouts_dropped=self.stale_rollouts)
            self.stale_rollouts, self.t_stale_event = 0, time.monotonic()

    def _set_aside(self, part: LostPart) -> None:
        """Drops the rollouts of a damaged part; the parts after it are not affected."""
        self.stage.milestone(f"set aside {part.left.rollouts} rollouts: {part.reason}")
        exists = self.lineage.holds(part.record.incarnation, part.record.max_policy_version)
        self._drop(part, "corrupt" if exists else "rolled_back")
        if exists:
            num_groups = part.left.rollouts // self.config.generation.group_size
            self.account.groups_dropped += num_groups

    def _step(self) -> None:
        """One optimizer step on the groups taken; on return they count as consumed."""
        # Arrival order varies from run to run; the order in the batch must not.
        groups = sorted(self.groups, key=lambda group: group.group_id)
        samples = samples_of(groups, self.config.training.advantage, self.trainer.policy_version, self.selection)
        self.handover.tend()
        self.handover.forget()
        with self.stage.busy("train"):
            report = self.trainer.step(samples)
        failpoint("train.before_handover")
        with self.stage.busy("handover"):
            self._hand_over()
        # As early as possible: generators wait for the device.
        self.turns.end()
        failpoint("train.after_handover")
        version = self.trainer.policy_version
        lags = [group.staleness(version - 1) for group in groups]
        for group, lag in zip(groups, lags, strict=True):
            self._account_for(group, lag)
        advantages = (sample.advantage for sample in samples)
        self.consumed.step(version, groups, advantages, report.trainer_logprobs)
        if self.config.prompts.curriculum.window is not None and self.config.pipeline.mode == "sync":
            # What the curriculum reads of it before the next step but one must not depend on time.
            self.consumed.flush()
        self.groups = []
        self._check_ledger()
        self.settled = self._settle()
        self._publish(report)
        measures = self.state.measure(
            report,
            groups,
            lags,
            **self._watch_length_bias(groups),
            zero_advantage_share=self.spread.step(),
            buffered_rollouts=self.ledger.buffered.rollouts,
            in_flight_rollouts=self.ledger.in_flight.rollouts,
            overtaken_groups_max=max(self.overtaken),
            overtaken_groups_mean=sum(self.overtaken) / len(self.overtaken),
        )
        self.overtaken = []
        if version % 10 == 0:
            reward = measures["reward_mean"]
            self.stage.milestone(f"version {version}: reward {reward:.3f}, staleness {min(lags)}–{max(lags)}")

    def _watch_length_bias(self, groups: Sequence[ScoredGroup]) -> dict[str, float]:
        """Returns the metrics of a step on `groups`."""
        for group in groups:
            self.length_bias.take(group, group.trained)
        ratios = self.length_bias.step()
        if self.length_bias.has_left(ratios):
            self.stage.tell("staleness.length-bias", **asdict(ratios), sentence=ratios.sentence)
            self.stage.milestone(ratios.sentence)
        self.stage.progress(
            length_ratio=ratios.length_ratio,
            reward_ratio=ratios.reward_ratio,
            zero_advantage_share=self.spread.share,
        )
        return ratios.metrics()

    def _account_for(self, group: ScoredGroup, lag: int) -> None:
        self.account.train(
            group.amount(group.trained),
            generator=group.generator,
            staleness=lag,
            reward_sum=_reward_sum(group, group.trained),
            masked=group.masked_amount(),
        )
        for reason, members in group.left_out.items():
            amount, reward_sum = group.amount(members), _reward_sum(group, members)
            self.account.drop(reason, amount, generator=group.generator, reward_sum=reward_sum)

    def _hand_over(self) -> None:
        weights_id = WeightsId(
            incarnation=self.state.incarnation,
            policy_version=self.trainer.policy_version,
            t_offered=time.time(),
        )
        probe = Probe(tokens=self.probed, logprobs=self.trainer.next_logprobs(self.probed, NUM_LOGPROBS))
        self.handover.offer(Manifest(id=weights_id, probe=probe))

    def _settle(self) -> dict[str, Any]:
        return {
            "account": self.account.to_json(),
            "intake": self.loader.state(),
            "lineage": self.lineage.to_json(),
        }

    def _check_ledger(self) -> None:
        generated, scored = self.committed.look()
        consumed = self.loader.consumed()
        self.ledger = balance(
            generated=generated, scored=scored, consumed=consumed, account=self.account, balanced=self.balanced
        )
        self.balanced = consumed

    def _publish(self, report: StepReport | None) -> None:
        self.state.publish(
            report,
            now=True,
            max_steps=self.config.training.max_steps,
            groups_dropped=self.account.groups_dropped,
            rollouts=self.account.trained.rollouts,
            tokens=self.account.trained.tokens,
            consumed=[amount.to_json() for amount in self.loader.consumed()],
            account=self.settled["account"],
        )


def _reward_sum(group: ScoredGroup, members: Sequence[int]) -> float:
    return float(sum(group.rewards[i] or 0.0 for i in members))
