"""A stored run as the source of a replay: the batches that its trainer consumed, and everything needed to repeat them.

║ consumed ║ ─► rows that were not rolled back ─► groups: a row per group, in the order of the batches
║ trajectories ║ + ║ annotations ║ ─► read(rows of groups): whole, verified, in any order
║ trainer_logprobs ║ ─► trainer_logprobs(step)
checkpoints ─► those that were not rolled back and still have their files

Only reads: the run's writers are not fenced.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import ReplayError
from millrace.replay.parts import ScoredParts, Scores, data_records
from millrace.replay.results import read_spec
from millrace.rollouts.arrow import list_slices
from millrace.rollouts.consumed import TRAINED, read_consumed, read_consumed_step
from millrace.rollouts.lineage import part_of_step
from millrace.rollouts.masking import mask_as_stored
from millrace.rollouts.scored_group import ScoredGroup
from millrace.runs.decisions import StoredDecision, rate_factor, read_decisions
from millrace.runs.history import read_step, read_steps
from millrace.runs.record import latest_attempt, read_run
from storage import layout
from storage.checkpoints import Checkpoint, stored_checkpoints
from storage.errors import StreamCorrupt
from storage.schema import TRAINER_LOGPROBS
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.log import backwards
from storage.streams.record import Record
from storage.streams.stream import read_part, read_removed, stream_head

_OF_FIRST_ROW = ("incarnation", "generator", "group_id", "source", "staleness", "staleness_in_flight", "t")
"""Columns of CONSUMED that are the same in all rows of a group."""


@dataclass(frozen=True, kw_only=True)
class TrainedStep:
    """One step, as the trainer saw it."""

    groups: list[ScoredGroup]
    """The batch in order, with the rewards that the trainer used."""
    advantages: dict[tuple[int, int], float]
    """(group_id, member) of each trained trajectory, in the order of the batch → its advantage."""
    trainer_logprobs: dict[tuple[int, int], npt.NDArray[np.float32]]
    """(group_id, member) → [R] log π before the step, nats."""
    numbers: dict[str, float]
    """The trainer's metrics by name; empty if they are damaged."""


class SourceRun:
    """The run in `store`. `scores`, if given, replace its own: in groups that are read, and in the reward columns.

    If it trained on trajectories of another run, `generated_in` is that run's store.

    Opening it reads the whole stream `consumed`; with `step`, only that step, and nothing else is known then. Raises
    RunMissing, ReplayError if the run did not store what its trainer consumed, and StreamCorrupt if that is damaged.
    """

    def __init__(
        self, store: Store, *, scores: Scores | None = None, step: int | None = None, generated_in: Store | None = None
    ) -> None:
        self.store = store
        self._generated_in = generated_in or store
        self.url = store.url
        self.run_id: str = read_run(store)["run_id"]
        self.attempt = latest_attempt(store)
        self.config = self.attempt.config
        """As JSON."""
        self._scores = scores
        self._step = step
        self._rows = read_consumed(store) if step is None else read_consumed_step(store, step)
        if self._rows.num_rows == 0:
            head = stream_head(store, layout.CONSUMED)
            parts = (record for record in backwards(store, layout.CONSUMED, head) if record.kind == "data")
            newest = next(parts, None)
            if step is not None and newest is not None:
                expected = f"one of 1 to {newest.max_policy_version}"
                raise ReplayError(f"no step {step}", file=self.url, expected=expected)
            raise ReplayError(f"{layout.CONSUMED} has no rows", file=self.url, expected="a run that finished a step")
        self._starts = np.flatnonzero(self._rows["sample_index"].to_numpy() == 0)
        rewards = self._rows["reward"].to_numpy() if scores is None else self._new_rewards()
        self.groups = _group_table(self._rows, self._starts, rewards.astype(np.float64))
        """One row per group, in the order of the stream; docs/replay.md describes its columns."""
        self._steps = self.groups["step"].to_numpy()
        self._logprobs_part: tuple[int, pa.Table] | None = None

    @cached_property
    def steps(self) -> list[int]:
        """Steps whose batch is stored, named by the policy version they made, ascending."""
        steps: list[int] = np.unique(self._steps).tolist()
        return steps

    @property
    def vocab_size(self) -> int | None:
        """Number of token ids its policy knew; None if its trajectories do not record it."""
        sizes = {record.vocab_size for records in self.parts.records for record in records} - {0}
        return max(sizes, default=None)

    @cached_property
    def parts(self) -> ScoredParts:
        """Its trajectories with their scores. Raises StreamCorrupt for a damaged record."""
        rows = None
        if self._step is not None:
            generators, first_rows = (self.groups[name].to_numpy() for name in ("generator", "first_row_id"))
            rows = {g: first_rows[generators == g].tolist() for g in np.unique(generators).tolist()}
        return ScoredParts(self._generated_in, self._scores, rows)

    @cached_property
    def checkpoints(self) -> dict[int, Checkpoint]:
        """The checkpoints that were not rolled back and still have their files, by ascending version.

        Raises StreamCorrupt.
        """
        return stored_checkpoints(self.store)

    def checkpoint(self, step: int) -> Checkpoint:
        """The stored checkpoint of that policy version. Raises ReplayError, which lists those that exist."""
        if step not in self.checkpoints:
            versions = ", ".join(map(str, self.checkpoints)) or "none, as no checkpoint is stored"
            raise ReplayError(f"no checkpoint of version {step}", file=self.url, expected=f"one of {versions}")
        return self.checkpoints[step]

    def batch(self, step: int) -> npt.NDArray[np.int64]:
        """Rows of `groups` trained by the step that made that version, in the order of the batch."""
        first, last = np.searchsorted(self._steps, [step, step + 1])
        in_batch = self.groups["place"].to_numpy()[first:last] >= 0
        rows: npt.NDArray[np.int64] = first + np.flatnonzero(in_batch)
        return rows

    def read(self, rows: Sequence[int]) -> Iterator[ScoredGroup]:
        """Reads these rows of `groups`, in this order, with the masks of their step.

        Near the stream's order, each part is read once. Raises StreamCorrupt for damage, PartRemoved, and ReplayError
        for missing scores.
        """
        columns = [self.groups[name].to_numpy() for name in ("generator", "first_row_id", "group_id")]
        for row in rows:
            generator, first_row_id, group_id = (int(column[row]) for column in columns)
            group = self.parts.group(generator, first_row_id)
            if group.group_id != group_id:
                raise StreamCorrupt(
                    layout.trajectories(generator),
                    f"row {first_row_id} is of group {group.group_id}, but the trainer took it as {group_id}",
                )
            try:
                yield mask_as_stored(group, self._of_row(row, "masked_tokens"))
            except ValueError as error:
                raise StreamCorrupt(layout.CONSUMED, str(error)) from error

    def check_stored(self, rows: npt.NDArray[np.int64]) -> None:
        """Raises ReplayError unless the trajectories and scores of these rows of `groups` still exist."""
        generators, first_rows = (self.groups[name].to_numpy() for name in ("generator", "first_row_id"))
        for generator in np.unique(generators[rows]).tolist():
            # gc removes scores together with their trajectories.
            removed = read_removed(self.parts.store, layout.trajectories(generator))
            is_gone = self.parts.parts_of(generator, first_rows) < removed
            gone = np.flatnonzero(is_gone & (generators == generator))
            if np.isin(rows, gone).any():
                raise ReplayError(
                    f"millrace gc removed the first {removed} parts of {layout.trajectories(generator)}",
                    file=self.url,
                    expected=f"a range that begins with step {int(self._steps[gone[-1]]) + 1} or later"
                    if self._step is None
                    else "a later step",
                )

    def rewards(self, row: int) -> list[float | None]:
        """[G] rewards of that row of `groups` as its trainer saw them; None where the verifier had failed."""
        return self._of_row(row, "reward")

    def read_trained(self, steps: Sequence[int]) -> Iterator[TrainedStep]:
        """Reads these steps in one pass over their parts.

        Raises as `read`, and ReplayError if a step stored too little.
        """
        batches = [self.batch(step).tolist() for step in steps]
        rows = [row for batch in batches for row in batch]
        self.check_stored(np.array(rows, dtype=np.int64))
        stored = self.read(rows)
        if self._step is None:
            numbers = {step.policy_version: step.values for step in read_steps(self.store)}
        else:
            numbers = {self._step: read_step(self.store, self._step, self.groups["incarnation"][0].as_py())}
        for step, batch in zip(steps, batches, strict=True):
            groups = [replace(next(stored), rewards=self.rewards(row)) for row in batch]
            members = [
                (group.group_id, member)
                for row, group in zip(batch, groups, strict=True)
                for member, outcome in enumerate(self._of_row(row, "outcome"))
                if outcome == TRAINED
            ]
            yield TrainedStep(
                groups=groups,
                advantages=dict(zip(members, self.advantages(step), strict=True)),
                trainer_logprobs=dict(zip(members, self.trainer_logprobs(step), strict=True)),
                numbers=numbers.get(step, {}),
            )

    def rate_factor(self, step: int) -> float:
        """Factor of the learning rate in that step: that of the rollbacks before its trainer. Raises StreamCorrupt."""
        return rate_factor(self._decisions, self.groups["incarnation"][int(self.batch(step)[0])].as_py())

    @cached_property
    def _decisions(self) -> list[StoredDecision]:
        return read_decisions(self.store)

    def _of_row(self, row: int, name: str) -> list[Any]:
        """[G] values of a column of CONSUMED."""
        values: list[Any] = self._rows[name].slice(self._starts[row], self.groups["rollouts"][row].as_py()).to_pylist()
        return values

    def advantages(self, step: int) -> list[float]:
        """Advantage of each trained trajectory of the step, in the order of the batch; float32."""
        advantages: list[float] = self._trained_rows(step)["advantage"].to_pylist()
        return advantages

    def trainer_logprobs(self, step: int) -> list[npt.NDArray[np.float32]]:
        """[trained trajectories] of [R] log π before the step, nats, in the order of the batch.

        Raises ReplayError if they are not stored, or no longer, and StreamCorrupt.
        """
        if not self.logprobs_stored(step):
            raise ReplayError(f"the trainer's log-probabilities of step {step} are not stored", file=self.url)
        record, trained = self._logprobs_records[step], self._trained_rows(step)
        # A part holds the rows of consecutive steps.
        if self._logprobs_part is None or self._logprobs_part[0] != record.part:
            self._logprobs_part = record.part, read_part(self.store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS, record)
        table = self._logprobs_part[1]
        table = table.filter(pc.equal(table["policy_version"], step))
        names = ("generator", "trajectory_row_id")
        if not all(table[name].to_pylist() == trained[name].to_pylist() for name in names):
            file = f"{layout.TRAINER_LOGPROBS}/{record.file}"
            raise StreamCorrupt(file, f"its rows of step {step} are not those that {layout.CONSUMED} names", record.seq)
        return list_slices(table["trainer_logprobs"])

    def logprobs_stored(self, step: int) -> bool:
        """Whether `trainer_logprobs` of that step exist."""
        return step in self._logprobs_records

    def _trained_rows(self, step: int) -> pa.Table:
        first, last = np.searchsorted(self._rows["policy_version"].to_numpy(), [step, step + 1])
        rows = self._rows.slice(first, last - first)
        return rows.filter(pc.equal(rows["outcome"], TRAINED))

    @cached_property
    def _logprobs_records(self) -> dict[int, Record]:
        """Step → the record of the part with its rows, unless it was removed; a repeated step's newest."""
        removed = read_removed(self.store, layout.TRAINER_LOGPROBS)
        if self._step is not None:
            record = part_of_step(self.store, layout.TRAINER_LOGPROBS, self._step)
            return {} if record is None or record.part < removed else {self._step: record}
        return {
            step: record
            for record in data_records(self.store, layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS)[removed:]
            for step in range(record.min_policy_version, record.max_policy_version + 1)
        }

    def _new_rewards(self) -> npt.NDArray[np.float32]:
        """[rows of consumed] by the scores in use, NaN for none."""
        generators, row_ids = (self._rows[name].to_numpy() for name in ("generator", "trajectory_row_id"))
        rewards = np.full(len(row_ids), np.nan, dtype=np.float32)
        for generator in np.unique(generators).tolist():
            its_rows = generators == generator
            rewards[its_rows] = self.parts.rewards(generator)[row_ids[its_rows]]
        return rewards


def _group_table(rows: pa.Table, starts: npt.NDArray[np.int64], rewards: npt.NDArray[np.float64]) -> pa.Table:
    """The groups in the surviving `rows` of CONSUMED, which begin at `starts`; `rewards` ([rows]) are NaN for none."""
    first = rows.take(starts)
    values = {name: rows[name].to_numpy() for name in ("tokens", "min_policy_version", "max_policy_version")}
    rollouts = np.diff(starts, append=rows.num_rows)
    verified = np.add.reduceat(np.isfinite(rewards).astype(np.int32), starts)
    tokens = np.add.reduceat(values["tokens"].astype(np.int64), starts)
    is_trained = pc.equal(rows["outcome"], TRAINED).to_numpy(zero_copy_only=False)
    trained, steps = np.logical_or.reduceat(is_trained, starts), first["policy_version"].to_numpy()
    places = np.full(len(steps), -1, dtype=np.int32)
    # Steps ascend, so searchsorted finds the first group of each step.
    places[trained] = np.arange(trained.sum()) - np.searchsorted(steps[trained], steps[trained])
    with np.errstate(invalid="ignore"):
        means = np.add.reduceat(np.nan_to_num(rewards), starts) / verified
    numbers = {"mean": means, "min": np.fmin.reduceat(rewards, starts), "max": np.fmax.reduceat(rewards, starts)}
    return pa.table(
        {
            "step": first["policy_version"],
            "first_row_id": first["trajectory_row_id"],
            **{name: first[name] for name in _OF_FIRST_ROW},
            "rollouts": rollouts.astype(np.int32),
            "verified": verified,
            "min_policy_version": np.minimum.reduceat(values["min_policy_version"], starts),
            "max_policy_version": np.maximum.reduceat(values["max_policy_version"], starts),
            "tokens": tokens,
            "length_mean": tokens / rollouts,
            **{f"reward_{name}": pa.array(column, mask=verified == 0) for name, column in numbers.items()},
            "place": places,
            "outcome": pc.if_else(pa.array(trained), TRAINED, first["outcome"]),
        }
    )


def open_run_or_replay(store: Store, step: int | None = None) -> SourceRun:
    """The run in `store`, or its one step; if it is a replay's, with the trajectories of the run that it trained on.

    Raises as SourceRun, and ReplayError for a replay of several runs.
    """
    request = read_spec(store)
    if request is None:
        return SourceRun(store, step=step)
    if len(request.sources) > 1:
        # It does not record the source of each trajectory.
        raise ReplayError(f"a replay of {len(request.sources)} runs", file=store.url, expected="a replay of one run")
    return SourceRun(store, step=step, generated_in=open_store(request.sources[0]))
