"""A stored run of any size, as a campaign would leave it, generated in seconds without model or processes.

    StoredRun ─► run.json
       append(steps) ─► trajectories ─► scores ─► consumed, trainer_logprobs ─► metrics ─► checkpoint ─► status
       finish        ─► a part that was not taken any more ─► attempts/0000.ended

The ledger balances after each append: account, cursors and commit logs agree.
"""

import json
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from support.stored_run.metrics import (
    STEP_SECONDS,
    generator_status,
    metric_rows,
    source_metrics,
    stage_metrics,
    status_record,
    trainer_metrics,
    trainer_status,
)
from support.stored_run.rows import (
    MAX_TOKENS,
    VOCAB_SIZE,
    MadeRollout,
    Shape,
    consumed_rows,
    logprob_rows,
    make_group,
    score_rows,
    trajectory_rows,
)

import configs
from configs.load import changed_defaults, load_config
from millrace.evaluation.results import HELD_OUT, as_result
from millrace.rollouts.consumed import SourceLedger
from millrace.rollouts.ledger import Account, Amount
from millrace.rollouts.lineage import Lineage
from millrace.runs.decisions import Decisions, StoredDecision
from millrace.runs.provenance import Origin
from millrace.runs.record import create_run, end_attempt, read_end, read_run
from millrace.runtime.metrics import RewardCurve, extend_curve, extend_recent
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.progress import read_status, write_progress
from storage.schema import CONSUMED, METRIC, SCORE, TRAINER_LOGPROBS, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogReader
from storage.streams.stream import StreamWriter

_CHECKPOINT_EVERY = 20
_REWARD = "exact_match"


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
        generators, scorers = range(shape.generators), range(shape.scorers)
        rows = {"vocab_size": VOCAB_SIZE, "group_size": shape.group_size}
        self._trajectories = [
            StreamWriter(store, layout.trajectories(g), TRAJECTORY, f"generate-{g}", **rows) for g in generators
        ]
        paths = [[layout.annotations(f"scores/{_REWARD}", g, s, shape.scorers) for s in scorers] for g in generators]
        self._scores = [
            [StreamWriter(store, path, SCORE, f"score-{s}") for s, path in enumerate(of_generator)]
            for of_generator in paths
        ]
        self._taken = [LogReader(store, layout.trajectories(g)) for g in generators]
        self._scores_taken = [[LogReader(store, path) for path in of_generator] for of_generator in paths]
        self._consumed = StreamWriter(store, layout.CONSUMED, CONSUMED, "train-0")
        self._logprobs = StreamWriter(store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS, "train-0")
        replicas = [("generate", g) for g in generators] + [("score", s) for s in scorers]
        self._metrics = {
            (stage, r): StreamWriter(store, layout.metrics(stage, r), METRIC, f"{stage}-{r}")
            for stage, r in [*replicas, ("train", 0), ("sync_weights", 0)]
        }
        self._checkpoints = CheckpointWriter(store)
        self._incarnation, latest = self._checkpoints.incarnation, self._checkpoints.latest
        self.policy_version = 0 if latest is None else latest.step
        self._account = Account() if latest is None else Account.from_json(latest.state["account"])
        self._next_group = 0 if latest is None else latest.state["next_group"]
        self._lineage = Lineage.after(latest, self._incarnation)
        self._step_metrics: dict[str, float] = {}
        self._curve: RewardCurve = read_status(store, "train", 0).get("reward_curve", [])
        self._recent: dict[str, list[float]] = read_status(store, "train", 0).get("recent", {})

    @property
    def t_now(self) -> float:
        """When the newest step was done, in unix seconds; steps are evenly spaced."""
        return self._t_step(self.policy_version)

    def append(self, steps: int) -> None:
        """Adds `steps` steps, with a checkpoint and status records at their end."""
        end = self.policy_version + steps
        while self.policy_version < end:
            last = min(end, self.policy_version + self.shape.steps_per_part)
            self._append_part(range(self.policy_version + 1, last + 1))
        for reader in [*self._taken, *(reader for readers in self._scores_taken for reader in readers)]:
            reader.to_head()
        state = {
            "account": self._account.to_json(),
            "intake": [
                {
                    "trajectories": reader.cursor.to_json(),
                    "annotations": {
                        "scores/exact_match": [scores.cursor.to_json() for scores in self._scores_taken[g]]
                    },
                    "taken": Amount().to_json(),
                }
                for g, reader in enumerate(self._taken)
            ],
            "next_group": self._next_group,
            "lineage": self._lineage.to_json(),
        }
        self._checkpoints.commit(self.policy_version, {"model.safetensors": b"made up"}, state)
        self._write_status("train")

    def evaluate(self, accuracy: float) -> None:
        """Adds a held-out result of the current policy version."""
        stamp = {"policy_version": self.policy_version, "weights_checksum": None, "seconds": 0.1, "t": self.t_now}
        interval = [accuracy - 0.05, accuracy + 0.05]
        measured = {"accuracy": accuracy, "accuracy_interval": interval, "prompts": 128, "errors": 0}
        by_source = {source: {HELD_OUT: measured} for source in self.shape.sources}
        values = {**stamp, **as_result(by_source, dict.fromkeys(by_source, 1.0))}
        self.store.put(layout.evaluation(self.policy_version), json.dumps(values).encode())

    def decide(self) -> None:
        """Adds a decision of the trainer at the current policy version: its bound rises by one."""
        bound = self.shape.max_staleness
        decision = StoredDecision(
            t=self.t_now,
            incarnation=self._incarnation,
            policy_version=self.policy_version,
            action="raise",
            max_staleness=bound,
            reason=f"the trainer waits, and generators wait for room: the bound rises to {bound}",
        )
        Decisions(self.store).add(decision)

    def finish(self) -> None:
        """Ends the attempt. Each generator's stream keeps a part that was not taken; the last one's is unscored."""
        rollouts = self._make_rollouts(self._random(), range(self.policy_version + 1, self.policy_version + 2))
        self._write_rollouts(rollouts, unscored=self.shape.generators - 1)
        self._write_status("stopped")
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
            "staleness.too_old=drop",
            *(f"sources.{source}.weight=1" for source in shape.sources if len(shape.sources) > 1),
        ]
        config = load_config(Path(configs.__file__).parent / "presets" / "tiny-cpu.yaml", overrides)
        if not self.store.exists(layout.RUN):
            origin = Origin(defaults=changed_defaults(config))
            create_run(self.store, run_id, config.model_dump(mode="json"), origin)
            record = read_run(self.store)
            record["t_started"] -= shape.steps * STEP_SECONDS + 2
            self.store.put(layout.RUN, json.dumps(record).encode())
        self._t_started = float(read_run(self.store)["t_started"])

    def _random(self) -> np.random.Generator:
        return np.random.default_rng([self.shape.seed, self.policy_version, self._incarnation])

    def _t_step(self, step: int) -> float:
        return self._t_started + 1 + step * STEP_SECONDS

    def _make_rollouts(self, random: np.random.Generator, steps: range) -> list[MadeRollout]:
        """The rollouts of these steps in the order in which they are taken: of each step first those to be dropped."""
        shape, rollouts, group_id = self.shape, list[MadeRollout](), self._next_group
        next_rows = [writer.rows for writer in self._trajectories]
        for step in steps:
            # The first steps can't have stale groups.
            may_be_stale = step > shape.max_staleness + 2
            dropped = int(random.poisson(shape.groups_per_step * shape.stale_share)) if may_be_stale else 0
            for place in range(dropped + shape.groups_per_step):
                row, t_step = next_rows[group_id % shape.generators], self._t_step(step)
                rollouts += make_group(
                    random, shape, group_id=group_id, step=step, stale=place < dropped, first_row=row, t_step=t_step
                )
                next_rows[group_id % shape.generators] += shape.group_size
                group_id += 1
        return rollouts

    def _write_rollouts(self, rollouts: list[MadeRollout], *, unscored: int = -1) -> None:
        """Commits a part to each generator's stream, with its scores except for generator `unscored`."""
        for g, writer in enumerate(self._trajectories):
            part = [rollout for rollout in rollouts if rollout.generator == g]
            if not part:
                continue
            amounts: dict[str, Any] = {
                "tokens": sum(rollout.tokens for rollout in part),
                "min_policy_version": min(rollout.min_version for rollout in part),
                "max_policy_version": max(rollout.max_version for rollout in part),
            }
            scores = self._scores[g][layout.annotator_of_part(writer.parts, self.shape.scorers)]
            group_ids = list(dict.fromkeys(rollout.group_id for rollout in part))
            writer.write(
                trajectory_rows(part, incarnation=self._incarnation, epoch=writer.epoch),
                incarnation=self._incarnation,
                group_ids=group_ids,
                last_group_id=max(group_ids),
                **amounts,
            )
            if g != unscored:
                scores.write(score_rows(part), **amounts)

    def _append_part(self, steps: range) -> None:
        random = self._random()
        rollouts = self._make_rollouts(random, steps)
        self._write_rollouts(rollouts)
        versions: dict[str, Any] = {
            "min_policy_version": steps[0],
            "max_policy_version": steps[-1],
            "incarnation": self._incarnation,
        }
        trained = [rollout for rollout in rollouts if rollout.outcome == "trained"]
        logprobs = logprob_rows(random, trained, self._incarnation)
        self._logprobs.write(logprobs, tokens=sum(rollout.tokens for rollout in trained), **versions)
        consumed = consumed_rows(rollouts, self._incarnation)
        self._consumed.write(consumed, tokens=sum(rollout.tokens for rollout in rollouts), **versions)
        self._account_for(rollouts)
        self._append_metrics(random, rollouts)
        self._next_group = rollouts[-1].group_id + 1
        self.policy_version = steps[-1]

    def _account_for(self, rollouts: list[MadeRollout]) -> None:
        for rollout in rollouts:
            amount = Amount(rollouts=1, tokens=rollout.tokens)
            common: dict[str, Any] = {"generator": rollout.generator, "reward_sum": rollout.reward or 0.0}
            if rollout.outcome == "trained":
                self._account.train(amount, staleness=rollout.staleness, **common)
            else:
                self._account.drop(rollout.outcome, amount, **common)
            self._account.groups_dropped += rollout.outcome == "stale" and rollout.sample_index == 0

    def _append_metrics(self, random: np.random.Generator, rollouts: list[MadeRollout]) -> None:
        tables: dict[tuple[str, int], list[pa.Table]] = {replica: [] for replica in self._metrics}
        for step, taken in groupby(rollouts, lambda rollout: rollout.step):
            rollouts_of_step = list(taken)
            batch = [rollout for rollout in rollouts_of_step if rollout.outcome != "stale"]
            self._step_metrics = trainer_metrics(random, batch, step)
            self._curve = extend_curve(self._curve, step, self._step_metrics["reward_mean"])
            self._recent = extend_recent(self._recent, self._step_metrics)
            sources = self.shape.sources if len(self.shape.sources) > 1 else ()
            for source in sources:
                self._step_metrics |= source_metrics(batch, rollouts_of_step, source)
            for stage, replica in self._metrics:
                values = stage_metrics(random, stage, self._account.taken().tokens)
                bound = float(self.shape.max_staleness)
                values |= {**self._step_metrics, "max_staleness": bound} if stage == "train" else {}
                values |= {f"source_weight/{source}": 1.0 for source in sources if stage == "generate"}
                stamp: dict[str, Any] = {"t": self._t_step(step), "incarnation": self._incarnation}
                tables[stage, replica].append(metric_rows(values, policy_version=step, **stamp))
        versions: dict[str, Any] = {
            "min_policy_version": rollouts[0].step,
            "max_policy_version": rollouts[-1].step,
            "incarnation": self._incarnation,
        }
        for replica_key, writer in self._metrics.items():
            writer.write(pa.concat_tables(tables[replica_key]), tokens=0, **versions)

    def _write_status(self, doing: str) -> None:
        steps, account = self.policy_version, self._account
        for stage, replica in self._metrics:
            record = status_record(stage, doing=doing, steps=steps, incarnation=self._incarnation, account=account)
            if stage == "generate":
                record |= generator_status(self._random(), steps)
                if len(self.shape.sources) > 1:
                    record["source_weights"] = dict.fromkeys(self.shape.sources, 1.0)
            elif stage == "train":
                cursors = [reader.cursor for reader in self._taken]
                consumed = [Amount(rollouts=cursor.rows, tokens=cursor.tokens) for cursor in cursors]
                record |= trainer_status(account, consumed, self._step_metrics, steps=steps, max_steps=self.shape.steps)
                record |= {"reward_curve": self._curve, "recent": self._recent}
                if len(self.shape.sources) > 1:
                    # As a trainer that starts from the version of now.
                    lineage = Lineage(self._incarnation + 1, {**self._lineage.until, self._incarnation: steps})
                    record["sources"] = SourceLedger(self.store, lineage).to_json()
            write_progress(self.store, stage, replica, record)


def make_run(store: Store, run_id: str, shape: Shape) -> StoredRun:
    """A run with all its steps, evaluated before and after them, but not finished."""
    run = StoredRun(store, run_id, shape)
    run.evaluate(0.25)
    while run.policy_version < shape.steps:
        run.append(min(_CHECKPOINT_EVERY, shape.steps - run.policy_version))
    run.evaluate(0.75)
    return run
