"""A stored run in which every number follows from its step, so that two runs are the same, bit for bit, unless changed.

ScriptedRun(store) ─► steps(1, 5) ─► trajectories, scores, consumed, trainer_logprobs, metrics, checkpoint a step
                      changed={"tokens": 3}: the second member of step 3's second group is another there

No model takes part. Step k trains groups 3(k − 1) to 3(k − 1) + 2, each of two members.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from support.stored_run.metrics import metric_rows

from configs.training import TrainingConfig
from millrace.rollouts.arrow import prompt_meta
from millrace.rollouts.consumed import ConsumedWriter
from millrace.rollouts.scored_group import ScoredGroup, zip_groups
from millrace.runs.record import create_run, resume_run
from millrace.training.samples import samples_of
from millrace.types import Prompt
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.schema import METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import Part, StreamWriter

GROUPS, MEMBERS = 3, 2
RATIO = 2.0
"""π/μ of every token of step 1; it grows by 1/8 a step."""
CHANGED_GROUP, CHANGED_MEMBER = 1, 1
CONFIG: dict[str, Any] = {
    "name": "scripted",
    "seed": 0,
    "pipeline": {"mode": "async"},
    "generation": {"replicas": 1},
    "scoring": {"reward": "exact_match", "replicas": 1},
    "training": {"max_steps": 9, "learning_rate": 0.5, "threads": 1},
}
_SCORES = layout.annotations("scores/exact_match", 0, 0, 1)
_EMPTY = ("t_environment", "message_roles", "message_starts", "kept_tokens", "kept_counts", "routed_experts")


class ScriptedRun:
    """Writes such a run into `store`. `changed`: name of a column or a number → the step in which it differs."""

    def __init__(
        self,
        store: Store,
        *,
        changed: Mapping[str, int] | None = None,
        config: Mapping[str, Any] | None = None,
        source_of: Callable[[int], str] = lambda group_id: "default",
    ) -> None:
        self.store = store
        self._changed = dict(changed or {})
        self._source_of = source_of
        create_run(store, "scripted", {**CONFIG, **(config or {})})
        self._start_trainer()

    def resume(self, **config: Any) -> None:
        """Starts another attempt, whose trainer resumes from the newest checkpoint."""
        self._consumed.close()
        resume_run(self.store, {**CONFIG, **config})
        self._start_trainer()

    def steps(self, first: int, last: int, *, first_group: int | None = None) -> "ScriptedRun":
        """The steps that make versions `first` to `last`, on the groups from `first_group` on; returns itself."""
        for step in range(first, last + 1):
            number = GROUPS * (step - 1) if first_group is None else first_group + GROUPS * (step - first)
            self._step(step, list(range(number, number + GROUPS)))
        return self

    def close(self) -> Store:
        """Commits all of it."""
        self._consumed.close()
        return self.store

    def _start_trainer(self) -> None:
        self._trajectories = StreamWriter(self.store, layout.trajectories(0), TRAJECTORY, "generate-0")
        self._scores = StreamWriter(self.store, _SCORES, SCORE, "score-0")
        self._metrics = StreamWriter(self.store, layout.metrics("train", 0), METRIC, "train-0")
        self._checkpoints = CheckpointWriter(self.store)
        self._consumed = ConsumedWriter(self.store, self._checkpoints.incarnation)

    def _step(self, step: int, group_ids: Sequence[int]) -> None:
        if self._is_changed("order", step):
            group_ids = [*group_ids[1:], group_ids[0]]
        if self._is_changed("groups", step):
            group_ids = [*group_ids[:-1], 1000]
        groups = self._groups(step, group_ids)
        *trained, stale = groups if self._is_changed("stale", step) else [*groups, None]
        if stale is not None:
            self._consumed.drop(stale, "stale", step - 1)
        samples = samples_of([group for group in trained if group is not None], TrainingConfig(max_steps=1), step - 1)
        advantages = [sample.advantage for sample in samples]
        if self._is_changed("advantages", step):
            advantages[self._changed_sample(trained)] += 1.0
        ratio = np.float32(np.log(RATIO + (step - 1) / 8))
        logprobs = [np.asarray(sample.rollout_logprobs, np.float32) + ratio for sample in samples]
        if self._is_changed("trainer_logprobs", step):
            logprobs[self._changed_sample(trained)][0] += 1.0
        entropies = [np.zeros_like(logprobs_R) for logprobs_R in logprobs]
        self._consumed.step(step, trained, advantages, logprobs, entropies)
        self._consumed.flush()
        self._measure(step)
        weights = f"weights of {step}{', moved' if self._is_changed('checkpoint', step) else ''}"
        self._checkpoints.commit(step, {"model.safetensors": weights.encode()}, {})

    def _groups(self, step: int, group_ids: Sequence[int]) -> list[ScoredGroup]:
        rows = [self._row(step, place, n, m) for place, n in enumerate(group_ids) for m in range(MEMBERS)]
        first = self._trajectories.rows
        scores = [self._score(step, row) for row in rows]
        for number, (row, score) in enumerate(zip(rows, scores, strict=True), first):
            row["row_id"] = score["row_id"] = number
        parts = []
        for writer, schema, values in ((self._trajectories, TRAJECTORY, rows), (self._scores, SCORE, scores)):
            table = pa.Table.from_pylist(values, schema=schema)
            record = writer.write(table, tokens=0, min_policy_version=step - 1, max_policy_version=step - 1)
            parts.append(Part(record=record, table=table))
        return zip_groups(parts[0], {"scores": parts[1].table}, 0)

    def _row(self, step: int, place: int, group_id: int, member: int) -> dict[str, Any]:
        length = 1 + (group_id + member) % 3
        row = {
            "group_id": group_id,
            "source": self._source_of(group_id),
            "prompt_id": f"p{group_id}",
            "sample_index": member,
            "prompt_tokens": [1, 3 + group_id % 10],
            "response_tokens": [3 + (group_id + member + t) % 10 for t in range(length)],
            "rollout_logprobs": [-(member + t + 1) / 4 for t in range(length)],
            "span_versions": [step - 1],
            "span_starts": [0],
            "min_policy_version": step - 1,
            "max_policy_version": step - 1,
            "incarnation": self._checkpoints.incarnation,
            "loss_mask": [1] * length,
            "finish_reason": "stop",
            "temperature": 1.0,
            "top_p": 1.0,
            "max_new_tokens": 4,
            "generator": 0,
            "epoch": 0,
            "seed": 7,
            "t_admitted": 1.0,
            "t_started": 2.0,
            "t_finished": 3.0,
            "meta": prompt_meta(
                Prompt(prompt_id=f"p{group_id}", text=f"{group_id}+1=", answer=str(group_id + 1), source="script")
            ),
            **{name: [] for name in _EMPTY},
        }
        if (place, member) == (CHANGED_GROUP, CHANGED_MEMBER):
            self._change(step, row)
        return row

    def _change(self, step: int, row: dict[str, Any]) -> None:
        for what, column in (
            ("prompts", "prompt_tokens"),
            ("tokens", "response_tokens"),
            ("rollout_logprobs", "rollout_logprobs"),
        ):
            if self._is_changed(what, step):
                row[column] = [row[column][0] + 1, *row[column][1:]]
        if self._is_changed("length", step):
            for column in ("response_tokens", "rollout_logprobs", "loss_mask"):
                row[column] = row[column] + row[column][-1:]
        if self._is_changed("versions", step):
            row["min_policy_version"], row["span_versions"] = step - 2, [step - 2]

    def _score(self, step: int, row: Mapping[str, Any]) -> dict[str, Any]:
        of_changed = row["group_id"] == GROUPS * (step - 1) + CHANGED_GROUP and row["sample_index"] == CHANGED_MEMBER
        reward: float | None = float(row["sample_index"])
        if of_changed and self._is_changed("rewards", step):
            reward = 0.5
        if row["sample_index"] == 0 and self._is_changed("failed", step):
            reward = None
        return {
            "reward": reward,
            "components": "{}",
            "status": "error" if reward is None else "ok",
            "error": "it broke" if reward is None else None,
            "verifier_version": "2" if "verifier_version" in self._changed else "1",
            "seconds": 0.0,
            "t_scored": 3.5,
        }

    def _measure(self, step: int) -> None:
        values = {"loss": step / 8, "grad_norm": step / 4}
        values = {name: value + 1 if self._is_changed(name, step) else value for name, value in values.items()}
        stamp: dict[str, Any] = {"t": float(step), "incarnation": self._checkpoints.incarnation, "policy_version": step}
        versions = {"min_policy_version": step, "max_policy_version": step, "incarnation": stamp["incarnation"]}
        self._metrics.write(metric_rows(values, **stamp), tokens=0, **versions)

    def _changed_sample(self, groups: Sequence[ScoredGroup]) -> int:
        return sum(len(group.verified) for group in groups[:CHANGED_GROUP]) + CHANGED_MEMBER

    def _is_changed(self, what: str, step: int) -> bool:
        return self._changed.get(what) == step
