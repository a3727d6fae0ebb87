"""A stored run of any size, as a campaign would leave it, generated in seconds without model or processes.

    StoredRun ─► run.json
       append(steps) ─► trajectories ─► scores ─► consumed, trainer_logprobs ─► metrics ─► checkpoint ─► status
       finish        ─► a part that was not taken any more ─► attempts/0000.ended

The ledger balances after each append: account, cursors and commit logs agree. One part of a stream holds
`steps_per_part` steps.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np
import pyarrow as pa
from support.stored_run.generator_streams import StoredGeneratorStreams
from support.stored_run.groups import (
    MAX_TOKENS,
    OUTCOMES,
    TRAINED,
    Groups,
    Numbers,
    Rollouts,
    consumed_rows,
    logprob_rows,
    make_groups,
    make_rollouts,
)
from support.stored_run.metrics import (
    in_flight,
    metric_rows,
    of_generator,
    of_sync_weights,
    of_trainer,
    stage_time,
)
from support.stored_run.status import STEP_SECONDS, of_the_trainer, status_record

import configs
from configs.load import load_config
from millrace.rollouts.ledger import Account, Amount
from millrace.rollouts.lineage import Lineage
from millrace.runs.decisions import Decisions, StoredDecision
from millrace.runs.record import create_run, end_attempt, read_end, read_run
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.progress import write_progress
from storage.schema import CONSUMED, METRIC, TRAINER_LOGPROBS
from storage.stores.base import Store
from storage.streams.stream import StreamWriter

_CHECKPOINT_EVERY = 20


@dataclass(frozen=True, kw_only=True)
class Shape:
    """The size of a run."""

    steps: int
    """Optimizer steps of the complete run."""
    groups_per_step: int = 4
    group_size: int = 4
    generators: int = 2
    scorers: int = 1
    max_staleness: int = 4
    steps_per_part: int = 1
    prompts: int = 2500
    """Different ones; each is asked once per epoch."""
    seed: int = 0
    stale_share: float = 0.02
    """Share of groups that are dropped as stale."""
    error_share: float = 0.01
    """Share of groups in which one member has no reward."""


class StoredRun:
    """A run in `store` that grows by `append`. Opening an existing run continues it, as a resumed trainer would.

    Raises ValueError for a finished run.
    """

    def __init__(self, store: Store, run_id: str, shape: Shape) -> None:
        self.store = store
        self.shape = shape
        if read_end(store, 0) is not None:
            raise ValueError(f"{store.url}: this run was finished; nothing can be appended to it")
        self._claim(run_id)
        self._streams = StoredGeneratorStreams(
            store, generators=shape.generators, scorers=shape.scorers, group_size=shape.group_size
        )
        self._consumed = StreamWriter(store, layout.CONSUMED, CONSUMED, "train-0")
        self._logprobs = StreamWriter(store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS, "train-0")
        self._metrics = {
            (stage, r): StreamWriter(store, layout.metrics(stage, r), METRIC, f"{stage}-{r}")
            for stage, r in self._replicas()
        }
        self._checkpoints = CheckpointWriter(store)
        found = self._checkpoints.latest
        self.policy_version = 0 if found is None else found.step
        self._account = Account() if found is None else Account.from_json(found.state["account"])
        self._next_group = 0 if found is None else found.state["next_group"]
        self._lineage = Lineage.after(found, self._checkpoints.incarnation)
        self._measured: dict[str, float] = {}
        self._pending: dict[tuple[str, int], list[pa.Table]] = {replica: [] for replica in self._metrics}

    @property
    def t_now(self) -> float:
        """When the newest step was done, in unix seconds; steps are evenly spaced."""
        return self._t_started + 1 + self.policy_version * STEP_SECONDS

    def append(self, steps: int) -> None:
        """Adds `steps` steps, with a checkpoint and status records at their end."""
        end = self.policy_version + steps
        while self.policy_version < end:
            self._append_part(
                range(self.policy_version + 1, min(end, self.policy_version + self.shape.steps_per_part) + 1)
            )
        self._checkpoint()
        self.write_status("train")

    def evaluate(self, accuracy: float) -> None:
        """Adds a held-out result of the current policy version."""
        values = {
            "policy_version": self.policy_version,
            "weights_checksum": None,
            "accuracy": accuracy,
            "prompts": 128,
            "errors": 0,
            "seconds": 0.1,
            "t": self.t_now,
        }
        self.store.put(layout.evaluation(self.policy_version), json.dumps(values).encode())

    def decide(self) -> None:
        """Adds a decision of the trainer at the current policy version: its bound rises by one."""
        bound = self.shape.max_staleness
        decision = StoredDecision(
            t=self.t_now,
            incarnation=self._checkpoints.incarnation,
            policy_version=self.policy_version,
            action="raise",
            max_staleness=bound,
            places=64,
            reason=f"the trainer waits, and generators wait for room: the bound rises to {bound}",
        )
        Decisions(self.store).add(decision)

    def write_status(self, doing: str, silent: Mapping[str, float] = MappingProxyType({})) -> None:
        """Writes each replica's status record; those in `silent` as of so many seconds ago, by `<stage>-<replica>`."""
        for stage, replica in self._metrics:
            record = self._status(stage, doing)
            ago = silent.get(f"{stage}-{replica}", 0.0)
            write_progress(self.store, stage, replica, {**record, "t": time.time() - ago})

    def finish(self) -> None:
        """Ends the attempt; each generator's stream keeps one part that was not taken, and one of these is unscored."""
        random = self._random()
        step = self.policy_version + 1
        rollouts = self._rollouts(random, range(step, step + 1))
        self._streams.write(rollouts, self._checkpoints.incarnation, unscored=self.shape.generators - 1)
        self.write_status("stopped")
        end_attempt(self.store, 0, "finished")

    def _claim(self, run_id: str) -> None:
        shape = self.shape
        overrides = [
            f"training.max_steps={shape.steps}",
            f"training.groups_per_step={shape.groups_per_step}",
            f"generation.group_size={shape.group_size}",
            f"generation.groups_per_batch={shape.groups_per_step}",
            f"generation.replicas={shape.generators}",
            f"generation.max_new_tokens={MAX_TOKENS}",
            f"scoring.replicas={shape.scorers}",
            f"staleness.max_staleness={shape.max_staleness}",
            # Its stale groups are dropped whole.
            "staleness.too_old=drop",
        ]
        config = load_config(Path(configs.__file__).parent / "presets" / "tiny-cpu.yaml", overrides)
        if not self.store.exists(layout.RUN):
            create_run(self.store, run_id, config.model_dump(mode="json"))
            record = read_run(self.store)
            record["t_started"] -= shape.steps * STEP_SECONDS + 2
            self.store.put(layout.RUN, json.dumps(record).encode())
        self._t_started = float(read_run(self.store)["t_started"])

    def _replicas(self) -> list[tuple[str, int]]:
        generators = [("generate", g) for g in range(self.shape.generators)]
        return [*generators, *(("score", s) for s in range(self.shape.scorers)), ("train", 0), ("sync_weights", 0)]

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self.shape.seed, self.policy_version, self._checkpoints.incarnation])

    def _rollouts(self, random: np.random.Generator, steps: range) -> Rollouts:
        groups = make_groups(
            random,
            steps,
            first_group=self._next_group,
            groups_per_step=self.shape.groups_per_step,
            generators=self.shape.generators,
            max_staleness=self.shape.max_staleness,
            stale_share=self.shape.stale_share,
            prompts=self.shape.prompts,
        )
        return make_rollouts(
            random,
            groups,
            group_size=self.shape.group_size,
            first_rows=self._streams.next_rows,
            t_step=self._t_step(groups),
            error_share=self.shape.error_share,
        )

    def _t_step(self, groups: Groups) -> Numbers:
        return self._t_started + 1 + groups.step * STEP_SECONDS

    def _append_part(self, steps: range) -> None:
        random = self._random()
        incarnation = self._checkpoints.incarnation
        rollouts = self._rollouts(random, steps)
        self._streams.write(rollouts, incarnation)
        versions: dict[str, Any] = {
            "min_policy_version": steps[0],
            "max_policy_version": steps[-1],
            "incarnation": incarnation,
        }
        trained = rollouts.tokens[rollouts.outcome == TRAINED]
        logprobs = logprob_rows(random, rollouts, incarnation=incarnation)
        self._logprobs.write(logprobs, tokens=int(trained.sum()), **versions)
        consumed = consumed_rows(rollouts, incarnation=incarnation, t_step=self._t_step(rollouts.groups))
        self._consumed.write(consumed, tokens=int(rollouts.tokens.sum()), **versions)
        self._account_for(rollouts)
        for step in steps:
            self._measure(random, rollouts, step)
        self._commit_metrics()
        self._next_group += len(rollouts.groups.group_id)
        self.policy_version = steps[-1]

    def _account_for(self, rollouts: Rollouts) -> None:
        """Counts rollouts as the trainer does, but by generator, outcome and staleness at once."""
        generator, staleness = rollouts.of("generator"), rollouts.of("staleness")
        kinds = np.stack([generator, rollouts.outcome, staleness])
        for g, outcome, lag in np.unique(kinds, axis=1).T.tolist():
            chosen = (generator == g) & (rollouts.outcome == outcome) & (staleness == lag)
            amount = Amount(rollouts=int(chosen.sum()), tokens=int(rollouts.tokens[chosen].sum()))
            reward_sum = float(np.nansum(rollouts.reward[chosen]))
            if outcome == TRAINED:
                self._account.train(amount, generator=g, staleness=lag, reward_sum=reward_sum)
            else:
                self._account.drop(OUTCOMES[outcome], amount, generator=g, reward_sum=reward_sum)
        self._account.groups_dropped += int(rollouts.groups.stale.sum())

    def _measure(self, random: np.random.Generator, rollouts: Rollouts, step: int) -> None:
        self._measured = of_trainer(random, rollouts, step)
        for stage, replica in self._metrics:
            values = stage_time(stage, self._account.taken().tokens)
            if stage == "train":
                values |= self._measured
            elif stage == "generate":
                values |= of_generator(random)
            elif stage == "sync_weights":
                values |= of_sync_weights(random)
            rows = metric_rows(
                values,
                t=self._t_started + 1 + step * STEP_SECONDS,
                incarnation=self._checkpoints.incarnation,
                policy_version=step,
            )
            self._pending[stage, replica].append(rows)

    def _commit_metrics(self) -> None:
        for replica, tables in self._pending.items():
            self._metrics[replica].write(pa.concat_tables(tables), tokens=0)
            tables.clear()

    def _checkpoint(self) -> None:
        self._streams.take()
        state = {
            "account": self._account.to_json(),
            "intake": self._streams.state(),
            "next_group": self._next_group,
            "lineage": self._lineage.to_json(),
        }
        self._checkpoints.commit(self.policy_version, {"model.safetensors": b"made up"}, state)

    def _status(self, stage: str, doing: str) -> dict[str, object]:
        record = status_record(
            stage,
            doing=doing,
            steps=self.policy_version,
            incarnation=self._checkpoints.incarnation,
            account=self._account,
        )
        if stage == "generate":
            return record | in_flight(self._random(), self.policy_version, t=time.time())
        if stage != "train":
            return record
        return record | of_the_trainer(
            account=self._account,
            consumed=self._streams.consumed(),
            measured=self._measured,
            max_steps=self.shape.steps,
            t_training=self.policy_version * STEP_SECONDS,
        )


def make_run(store: Store, run_id: str, shape: Shape) -> StoredRun:
    """A run with all its steps, evaluated before and after them, but not finished."""
    run = StoredRun(store, run_id, shape)
    run.evaluate(0.25)
    while run.policy_version < shape.steps:
        run.append(min(_CHECKPOINT_EVERY, shape.steps - run.policy_version))
    run.evaluate(0.75)
    return run
