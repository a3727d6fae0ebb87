"""The train loop of a campaign: scored groups in, policy versions out.

    ║ trajectories ║ + ║ annotations ║ ─► loader ─► readable? policy exists? trainable? selected? ─no─► dropped
                                                  │ yes                                                   and counted
    ┌─► groups_per_step of them ─► advantages ─► trainer ─► version + 1 ─► handover ─► sync_weights
    │                                                │
    │                                                ├─► ║ consumed ║ + ║ trainer_logprobs ║ outcome of each
    └──────── ledger balanced ◄──────────────────────┴─► every few steps: checkpoint (weights, optimizer, RNG,
                                                          stream cursors, account) in one commit, in the background

Groups of a step are recorded once the step is done. If the trainer dies, its successor continues from the newest
checkpoint and takes every group since then again. On resume, the trainer commits its checkpoint again under its own
incarnation, so that generators know which of their groups it will reject. A trainer that shares its device with
generators sleeps from the handover of a version until a step's worth of groups is scored
(`millrace/runtime/device_sharing.py`).
"""

import time
from typing import Any

from millrace.control.staleness import StalenessController
from millrace.evaluation.schedule import read_early_stop, stop_if_no_better
from millrace.rollouts.consumed import SourceLedger
from millrace.rollouts.ledger import Account, Amount, CommittedAmounts
from millrace.rollouts.loader import RolloutLoader
from millrace.runtime.device_sharing import DeviceTurns
from millrace.stages.train.batch_collector import BatchCollector, stragglers_are_in
from millrace.stages.train.collapse_guard import CollapseGuard
from millrace.stages.train.handover import Handover
from millrace.stages.train.train_state import TrainState, mixed_sources
from millrace.training.samples import samples_of
from millrace.training.step_report import StepReport
from millrace.weights.base import Manifest, Probe, WeightsId
from millrace.weights.probe import NUM_LOGPROBS
from storage.failpoints import failpoint


class TrainLoop:
    """Trains on scored groups and publishes policy versions, as the picture of this module shows.

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
        self.turns, self.handover = turns, handover
        self.probed, self.stop_at_step = probed, stop_at_step
        stored: dict[str, Any] = {} if state.restored_from is None else state.restored_from.state
        self.account = Account.from_json(stored["account"]) if stored else Account()
        # Position of the cursors when the ledger last balanced.
        self.balanced: list[Amount] = []
        streams: dict[str, Any] = {
            "pools": self.config.annotators,
            "num_generators": self.config.generation.replicas,
        }
        vocab_size, position = self.trainer.vocab_size, stored.get("intake")
        self.loader = RolloutLoader(
            self.stage.store, vocab_size=vocab_size, lineage=self.lineage, state=position, **streams
        )
        self.committed = CommittedAmounts(self.stage.store, **streams)
        self.collector = BatchCollector(self.stage, self.loader, self.lineage, self.consumed, self.account)
        self.controller = StalenessController(
            self.stage.store,
            self.config.staleness,
            self.config.generation.replicas,
            state.decisions,
            self.config.effective_max_staleness,
            incarnation=state.incarnation,
            state=stored.get("control"),
        )
        # None unless the run has several sources.
        self.sources = SourceLedger(self.stage.store, self.lineage) if mixed_sources(self.config) else None
        self.guard = CollapseGuard(state, self.controller.bound_of, stored.get("collapse"))
        # State after the last finished step, for the next checkpoint.
        self.settled = self._settle()
        state.adopt(self.settled)

    def run(self) -> None:
        """Runs until the last step, until evaluations stop improving, or until asked to drain."""
        self._check_ledger()
        # Before the weights: generators with a predecessor's larger count would admit too many groups.
        self.stage.update_status(now=True, groups_dropped=self.account.groups_dropped)
        self._hand_over()
        self.turns.end()
        self._publish(None)
        self._warm_up()
        if self.config.evaluation.stop_after is not None:
            # An earlier attempt may have evaluated enough.
            stop_if_no_better(self.stage.store, self.stage.arguments.attempt, self.config.evaluation.stop_after)
        while self.trainer.policy_version < self.stop_at_step and not (self.stage.draining or self._stops_early()):
            if not self.stage.wait(self._stragglers_in, why="waiting for groups that the step would leave too old"):
                break
            if not self.stage.wait(self._collect, why="waiting for scored groups"):
                break
            if not self.stage.wait(self.turns.begin, why="waiting for generators to give the device back"):
                break
            self._step()
            self.state.save_if_due(self.settled, evaluate_every=self.config.evaluation.every)
        if not self.stage.draining:
            self.handover.finish()
        failpoint("train.after_last_handover")
        self.state.finish(self.settled)

    def _warm_up(self) -> None:
        """Compiles while the generators start and sample. With a shared device they would have to wait for it."""
        compiles_now = self.trainer.compiles and not self.config.placement.colocated
        if compiles_now and self.trainer.policy_version < self.stop_at_step:
            with self.stage.busy("compile"):
                self.trainer.warm_up()

    def _stops_early(self) -> bool:
        if self.config.evaluation.stop_after is None:
            return False
        stop = read_early_stop(self.stage.store, self.stage.arguments.attempt)
        if stop is not None:
            self.stage.log(f"training ends early at version {self.trainer.policy_version}: {stop.sentence}")
        return stop is not None

    def _work_between_steps(self) -> None:
        """Background work between steps. Re-raises checkpoint errors."""
        self.state.checkpoints.check()
        self.handover.retry_pending()
        if self.handover.resend_requested() and self.turns.begin():
            self.stage.log(f"version {self.trainer.policy_version} is handed over again")
            self._hand_over()
            self.turns.end()

    def _stragglers_in(self) -> bool:
        self._work_between_steps()
        # In sync mode nothing is ever too old.
        waits = self.config.staleness.too_old == "wait" and self.config.pipeline.mode == "async"
        version = self.trainer.policy_version
        return not waits or stragglers_are_in(self.stage, self.loader, version, self.controller.bound_at(version + 1))

    def _collect(self) -> bool:
        """Collects scored groups. Returns whether they are enough for a step."""
        self._work_between_steps()
        dropped_before, version = self.account.groups_dropped, self.trainer.policy_version
        enough = self.collector.collect(version, self.controller.bound_at(version))
        if self.account.groups_dropped != dropped_before:
            # Generators read the count: each dropped group makes room for another.
            self.stage.update_status(
                now=True,
                groups_dropped=self.account.groups_dropped,
                zero_advantage_share=self.collector.spread.share,
            )
        return enough

    def _step(self) -> None:
        """One optimizer step on the groups taken; on return they count as consumed."""
        groups, taken_at = self.collector.in_order(), self.trainer.policy_version
        samples = samples_of(groups, self.config.training, taken_at, self.config.trainings())
        self.handover.retry_pending(last=True)
        trained_before = self.stage.seconds("train")
        with self.stage.busy("train"):
            report = self.guard.train(samples)
        failpoint("train.before_handover")
        with self.stage.busy("handover"):
            self._hand_over()
        # As early as possible: generators wait for the device.
        self.turns.end()
        failpoint("train.after_handover")
        version = self.trainer.policy_version
        lags = [group.staleness(taken_at) for group in groups]
        self.collector.account_for(lags)
        advantages = (sample.advantage for sample in samples)
        rows = self.consumed.step(version, groups, advantages, report.trainer_logprobs, report.trainer_entropies)
        if self.sources is not None:
            self.sources.add(rows)
        if self.config.pipeline.mode == "sync" and self.config.stores_prompt_blocks:
            # The prompts of the step after the next follow from these rows, and must not depend on timing.
            self.consumed.flush()
        ratios, of_collector = self.collector.end_step(taken_at)
        self._check_ledger()
        bound = max(self.controller.bound_of(taken_at), self.controller.bound_at(taken_at))
        rollouts = sum(len(group.rewards) for group in groups)
        self._control(report, ratios.step_length_ratio, steps_ready=self.account.buffered.rollouts / rollouts)
        measures = self.state.measure(
            report,
            groups,
            lags,
            **of_collector,
            train_seconds=self.stage.seconds("train") - trained_before,
            max_staleness=bound,
            buffered_rollouts=self.account.buffered.rollouts,
            in_flight_rollouts=self.account.in_flight.rollouts,
        )
        reward = measures["reward_mean"]
        collapse = self.guard.watch(report, groups, lags)
        self.settled = self._settle()
        self._publish(report)
        self.stage.update_status(
            length_ratio=ratios.length_ratio,
            reward_ratio=ratios.reward_ratio,
            zero_advantage_share=self.collector.spread.share,
        )
        if version % 10 == 0:
            self.stage.log(f"version {version}: reward {reward:.3f}, staleness {min(lags)}–{max(lags)}")
        self.stage.on_version(version)
        if collapse is not None:
            self.guard.act(collapse)

    def _control(self, report: StepReport, length_ratio: float, steps_ready: float) -> None:
        """Decides on the staleness bound of the next versions."""
        decision = self.controller.decide(
            self.trainer.policy_version,
            effective_sample_size=report.ratio_effective_sample_size,
            length_ratio=length_ratio,
            steps_ready=steps_ready,
            waited=self.stage.seconds("idle"),
        )
        if decision is None:
            return
        sentence = (
            f"staleness bound to {decision.max_staleness} from version {self.trainer.policy_version + 1} on: "
            f"{decision.reason}"
        )
        self.stage.update_status(control=sentence)
        changed = {"action": decision.action, "max_staleness": decision.max_staleness}
        self.stage.emit_event("staleness.control", **changed, sentence=sentence)
        self.stage.log(sentence)

    def _hand_over(self) -> None:
        version = self.trainer.policy_version
        weights_id = WeightsId(incarnation=self.state.incarnation, policy_version=version, t_offered=time.time())
        probe = Probe(tokens=self.probed, logprobs=self.trainer.next_logprobs(self.probed, NUM_LOGPROBS))
        bound = self.controller.bound_of(version)
        self.handover.publish(Manifest(id=weights_id, probe=probe, max_staleness=bound))

    def _settle(self) -> dict[str, Any]:
        return {
            "account": self.account.to_json(),
            "intake": self.loader.state(),
            "lineage": self.lineage.to_json(),
            "control": self.controller.state(),
            "collapse": self.guard.state(),
        }

    def _check_ledger(self) -> None:
        generated, scored = self.committed.look()
        consumed = self.loader.consumed()
        self.account.balance(generated=generated, scored=scored, consumed=consumed, balanced=self.balanced)
        self.balanced = consumed

    def _figures_of_sources(self) -> dict[str, Any]:
        if self.sources is None:
            return {}
        return {"sources": self.sources.to_json(), "source_rewards": dict(self.guard.rewards)}

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
            **self._figures_of_sources(),
        )
