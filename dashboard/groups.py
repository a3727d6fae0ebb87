"""Single groups, read from the store when somebody wants to see one: all that is known of each response.

RunData.consumed ─► (generator, row_id) ─► index of the stream's records ─► one part ─► the group's rows
                                           ║ trajectories/<g> ║   part k
                                           ║ scores/…/<s>-of-S ║  part k div S of scorer k mod S
                                           ║ trainer_logprobs ║   the parts of its step

What can't be read is a sentence, and the rest is told all the same.
"""

import threading
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dashboard.data import RunData
from dashboard.parts import PartReader, StreamIndex
from millrace.consumed import TRAINED
from millrace.errors import InputError
from storage import layout
from storage.errors import StorageError
from storage.record import Record
from storage.schema import SCORE, TRAINER_LOGPROBS, TRAJECTORY
from storage.store import Store

MAX_TEXT_PARTS = 256
"""Parts read at most to search the prompts of groups that lie far apart."""
_LARGEST_LOG_RATIO = 50.0

Row = Mapping[str, Any]
"""By column name, as `storage.schema` documents it."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Response:
    """One trajectory: what is stored of it in each stream; None where a stream has nothing, or can't be read."""

    row_id: int
    trajectory: Row | None
    score: Row | None
    taken: Row | None
    """What became of it, as in the stream `consumed`; None as long as the trainer has not taken it."""
    trainer_logprobs: npt.NDArray[np.float32] | None
    """[R] of the policy in training, nats; None unless trained."""

    @property
    def importance_ratios(self) -> npt.NDArray[np.float64] | None:
        """[R] π/μ of each token, NaN where it took no part in the loss; None unless both policies' are known."""
        if self.trajectory is None or self.trainer_logprobs is None:
            return None
        rollout = np.asarray(self.trajectory["rollout_logprobs"], np.float64)
        if len(rollout) != len(self.trainer_logprobs):
            return None
        log_ratios = np.clip(self.trainer_logprobs - rollout, -_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        return np.where(np.asarray(self.trajectory["loss_mask"]) > 0, np.exp(log_ratios), np.nan)


@dataclass(frozen=True, kw_only=True, eq=False)
class Group:
    """The responses to one prompt."""

    generator: int
    group_id: int
    """-1 where it is not known: its part can't be read."""
    responses: tuple[Response, ...]
    """At least one, in the order of their row_ids."""
    problems: tuple[str, ...]
    """What could not be read, a sentence each."""

    @property
    def prompt(self) -> Row | None:
        """The trajectory that tells of the prompt, which all of them share."""
        return self.responses[0].trajectory


class GroupReader:
    """Reads groups of the run in `store`, whose newest attempt has this `config`; thread-safe."""

    def __init__(self, store: Store, config: Mapping[str, Any]) -> None:
        self._reward: str = config["scoring"]["reward"]
        self._num_scorers: int = config["scoring"]["replicas"]
        self._num_generators: int = config["generation"]["replicas"]
        self._parts = PartReader(store)
        self._lock = threading.Lock()

    def read(self, run: RunData, generator: int, row: int) -> Group:
        """The group of that row. Raises InputError where no such row is known."""
        if generator >= self._num_generators:
            raise InputError(f"there is no generator {generator}: expected one below {self._num_generators}")
        with self._lock:
            problems: list[str] = []
            taken = _rows_taken(run, generator, row)
            span = self._span(generator, row, problems) or (range(min(taken), max(taken) + 1) if taken else None)
            if span is None:
                said = "".join(f": {problem}" for problem in problems)
                raise InputError(f"generator {generator} has no row {row} here{said}")
            trajectories = self._rows(layout.trajectories(generator), TRAJECTORY, span, problems)
            scores = self._scores(generator, span, problems)
            logprobs = self._trainer_logprobs(generator, taken, problems)
            responses = tuple(
                Response(
                    row_id=row_id,
                    trajectory=trajectories.get(row_id),
                    score=scores.get(row_id),
                    taken=taken.get(row_id),
                    trainer_logprobs=logprobs.get(row_id),
                )
                for row_id in span
            )
            of_group = trajectories.get(span[0]) or taken.get(span[0], {})
            return Group(
                generator=generator,
                group_id=of_group.get("group_id", -1),
                responses=responses,
                problems=tuple(dict.fromkeys(problems)),
            )

    def locate(self, group_id: int) -> tuple[int, int] | None:
        """Generator and first row of a group, whether the trainer has taken it or not; None where it is not there.

        Of one that was made twice, the second time. Raises what reading its part does.
        """
        with self._lock:
            generator = group_id % self._num_generators
            stream = self._parts.index(layout.trajectories(generator), TRAJECTORY, [])
            for record in reversed(stream.records):
                before = stream.records[record.part - 1].last_group_id if record.part else -1
                # Where the generator went back, the numbers do as well.
                if record.last_group_id >= group_id and (before < group_id or before > record.last_group_id):
                    found = np.flatnonzero(self._parts.read(stream, record)["group_id"].to_numpy() == group_id)
                    if len(found):
                        return generator, record.first_row_id + int(found[0])
        return None

    def prompts(
        self, places: Sequence[tuple[int, int]], *, max_parts: int = MAX_TEXT_PARTS
    ) -> dict[tuple[int, int], tuple[str, list[int]]]:
        """Name and [P] token ids of the prompt of each (generator, row), from so many parts at most.

        Those in parts that can't be read, or are one too many, are left out.
        """
        found: dict[tuple[int, int], tuple[str, list[int]]] = {}
        read: dict[tuple[int, int], pa.Table | None] = {}
        with self._lock:
            generators = {generator for generator, _ in places}
            streams = {g: self._parts.index(layout.trajectories(g), TRAJECTORY, []) for g in generators}
            for generator, row in places:
                if (record := streams[generator].record_of(row)) is None:
                    continue
                key = (generator, record.part)
                if key not in read and len(read) < max_parts:
                    read[key] = self._table(streams[generator], record, [])
                if (table := read.get(key)) is not None:
                    i = row - record.first_row_id
                    found[generator, row] = table["prompt_id"][i].as_py(), table["prompt_tokens"][i].as_py()
        return found

    def _table(self, stream: StreamIndex, record: Record, problems: list[str]) -> pa.Table | None:
        try:
            return self._parts.read(stream, record)
        except StorageError as error:
            problems.append(str(error))
            return None

    def _part_of(self, path: str, schema: pa.Schema, row: int, problems: list[str]) -> tuple[Record, pa.Table] | None:
        """The part of a stream that has a row; None where there is none, or it can't be read."""
        stream = self._parts.index(path, schema, problems)
        record = stream.record_of(row)
        table = None if record is None else self._table(stream, record, problems)
        return None if record is None or table is None else (record, table)

    def _span(self, generator: int, row: int, problems: list[str]) -> range | None:
        """The rows of the group that has `row`, by its part."""
        found = self._part_of(layout.trajectories(generator), TRAJECTORY, row, problems)
        if found is None:
            return None
        record, table = found
        group_ids = table["group_id"].to_numpy()
        starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
        i = bisect_right(starts, row - record.first_row_id) - 1
        ends = [*starts[1:].tolist(), len(group_ids)]
        return range(record.first_row_id + int(starts[i]), record.first_row_id + ends[i])

    def _rows(self, path: str, schema: pa.Schema, span: range, problems: list[str]) -> dict[int, Row]:
        """Rows of a stream that has a row_id, of one part."""
        found = self._part_of(path, schema, span[0], problems)
        if found is None:
            return {}
        record, table = found
        rows = table.slice(span[0] - record.first_row_id, len(span)).to_pylist()
        return {row["row_id"]: row for row in rows}

    def _scores(self, generator: int, span: range, problems: list[str]) -> dict[int, Row]:
        record = self._parts.index(layout.trajectories(generator), TRAJECTORY, []).record_of(span[0])
        if record is None:
            return {}
        scorer = record.part % self._num_scorers
        path = layout.scores(self._reward, generator, scorer, self._num_scorers)
        return self._rows(path, SCORE, span, problems)

    def _trainer_logprobs(
        self, generator: int, taken: Mapping[int, Row], problems: list[str]
    ) -> dict[int, npt.NDArray[np.float32]]:
        trained = [row_id for row_id, row in taken.items() if row["outcome"] == TRAINED]
        if not trained:
            return {}
        step = taken[trained[0]]["incarnation"], taken[trained[0]]["policy_version"]
        stream = self._parts.index(layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS, problems)
        tables = [self._table(stream, record, problems) for record in stream.of_step(*step)]
        found: dict[int, npt.NDArray[np.float32]] = {}
        for table in tables:
            if table is not None:
                mine = (table["generator"].to_numpy() == generator) & (table["policy_version"].to_numpy() == step[1])
                mine &= np.isin(table["trajectory_row_id"].to_numpy(), trained)
                for i in np.flatnonzero(mine).tolist():
                    values = table["trainer_logprobs"][i].values
                    found[table["trajectory_row_id"][i].as_py()] = values.to_numpy(zero_copy_only=False)
        if len(found) < len(trained) and None not in tables:
            problems.append(
                f"{layout.TRAINER_LOGPROBS} has nothing on {len(trained) - len(found)} responses that were trained: "
                "not committed yet, or trained before there was this stream"
            )
        return found


def _rows_taken(run: RunData, generator: int, row: int) -> dict[int, Row]:
    """row_id → what became of it, of all responses of the group that has `row`; empty where it was not taken yet."""
    consumed = run.consumed
    places = np.flatnonzero((consumed["generator"] == generator) & (consumed["trajectory_row_id"] == row))
    if len(places) == 0:
        return {}
    # The rows of a group are next to each other, and count from 0.
    first = int(places[-1]) - int(consumed["sample_index"][places[-1]])
    behind = np.flatnonzero(consumed["sample_index"][first + 1 :] == 0)
    last = first + 1 + int(behind[0]) if len(behind) else len(consumed["sample_index"])
    rows = [{name: column[i].item() for name, column in consumed.items()} for i in range(first, last)]
    return {
        values["trajectory_row_id"]: {
            **{name: None if value != value else value for name, value in values.items()},
            "outcome": run.outcomes[values["outcome"]],
        }
        for values in rows
    }
