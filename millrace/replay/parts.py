"""Groups of a stored run with their scores, by the id of their first row: in any order, each verified when read.

(generator, row) ─► which part? by the commit records ─┬─► ║ trajectories/<g> ║ part k ───────────────┐
                                                       └─► ║ scores/<pool>/<g>/<k mod S>-of-S ║ ─────┴─► zip
                         cache: the parts used last ◄──────────────────────────────────────────────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.stored import ScorerPools
from millrace.errors import ReplayError
from millrace.rollouts.scored_group import ScoredGroup, merge_scores, zip_groups
from storage import layout
from storage.errors import StreamCorrupt
from storage.schema import SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, read_part

CACHED_PARTS = 32
"""Parts kept in memory, those used last; those of a local run are mapped files."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The place of the scores of a run's trajectories: in the run itself, or in a replay that scored them anew."""

    store: Store
    scorers: ScorerPools


class ScoredParts:
    """The trajectories of `num_generators` generators in `store`, with their `scores`."""

    def __init__(self, store: Store, num_generators: int, scores: Scores) -> None:
        self.store = store
        self._scores = scores
        self.records = [data_records(store, layout.trajectories(g), TRAJECTORY) for g in range(num_generators)]
        """[generators] the commit records of the parts, by ordinal."""
        self._score_records: dict[str, Sequence[Record]] = {}
        self._groups = lru_cache(maxsize=CACHED_PARTS)(self._read_groups)

    def parts_of(self, generator: int, first_row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ordinals of the parts that hold these rows of a generator's stream. Raises ReplayError if it has none."""
        if generator >= len(self.records) or not self.records[generator]:
            raise ReplayError(
                f"no trajectories in {layout.trajectories(generator)}, as in the run of a replay",
                file=self.store.url,
                expected="the run in which they were generated",
            )
        starts = np.array([record.first_row_id for record in self.records[generator]])
        parts: npt.NDArray[np.int64] = np.searchsorted(starts, first_row_ids, side="right") - 1
        return parts

    def group(self, generator: int, first_row_id: int) -> ScoredGroup:
        """The group that begins with this row.

        Raises StreamCorrupt if it can't be read or does not exist, PartRemoved, and ReplayError if it has no scores.
        """
        groups = self._groups(generator, int(self.parts_of(generator, np.array([first_row_id]))[0]))
        if first_row_id not in groups:
            raise StreamCorrupt(layout.trajectories(generator), f"no group begins with row {first_row_id}")
        return groups[first_row_id]

    def rewards(self, generator: int) -> npt.NDArray[np.float32]:
        """[rows] reward of each row of a generator's stream, NaN where it is not scored or the verifier failed."""
        rewards = [np.zeros(0, dtype=np.float32)]
        for ordinal, record in enumerate(self.records[generator]):
            scores = self.scores(generator, ordinal, ["reward"])
            unscored = np.full(record.rows, np.nan, dtype=np.float32)
            rewards.append(unscored if scores is None else scores["reward"].to_numpy())
        return np.concatenate(rewards)

    def scores(self, generator: int, ordinal: int, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The scores of a part's rows; None if a pool has not scored it. Raises PartCorrupt or PartRemoved."""
        by_pool = {pool: self._scores_by(pool, generator, ordinal, columns) for pool in self._scores.scorers.replicas}
        scores = {pool: part for pool, part in by_pool.items() if part is not None}
        if len(scores) < len(by_pool):
            return None
        trajectories = Part(record=self.records[generator][ordinal], table=pa.table({}))
        if len(scores) > 1:
            trajectories = self.trajectories(generator, ordinal, ["source"])
        return merge_scores(trajectories, scores, self._scores.scorers, generator)

    def is_scored(self, generator: int, ordinal: int) -> bool:
        """Whether all pools have scored a part."""
        return all(self._score_record(pool, generator, ordinal)[1] for pool in self._scores.scorers.replicas)

    def _scores_by(self, pool: str, generator: int, ordinal: int, columns: Sequence[str] | None) -> Part | None:
        path, record = self._score_record(pool, generator, ordinal)
        if record is None:
            return None
        return Part(record=record, table=read_part(self._scores.store, path, SCORE, record, columns))

    def _score_record(self, pool: str, generator: int, ordinal: int) -> tuple[str, Record | None]:
        """The stream of a pool's scores of a part, and their commit record."""
        num_scorers = self._scores.scorers.replicas[pool]
        path = layout.scores_of_part(pool, generator, ordinal, num_scorers)
        if path not in self._score_records:
            self._score_records[path] = data_records(self._scores.store, path, SCORE)
        records = self._score_records[path]
        number = layout.num_scored_parts(layout.scorer_of_part(ordinal, num_scorers), ordinal, num_scorers)
        return path, records[number] if number < len(records) else None

    def trajectories(self, generator: int, ordinal: int, columns: Sequence[str] | None = None) -> Part:
        """The trajectories of a part. Raises PartCorrupt or PartRemoved."""
        record = self.records[generator][ordinal]
        table = read_part(self.store, layout.trajectories(generator), TRAJECTORY, record, columns)
        return Part(record=record, table=table)

    def prompt_id(self, group: ScoredGroup) -> str:
        """The id of the group's prompt. Raises PartCorrupt or PartRemoved."""
        ordinal = int(self.parts_of(group.generator, np.array([group.first_row_id]))[0])
        part = self.trajectories(group.generator, ordinal, ["prompt_id"])
        prompt_id: str = part.table["prompt_id"][group.first_row_id - part.record.first_row_id].as_py()
        return prompt_id

    def _read_groups(self, generator: int, ordinal: int) -> dict[int, ScoredGroup]:
        """The groups of a part by the row_id of their first row."""
        scores = self.scores(generator, ordinal)
        if scores is None:
            raise ReplayError(
                f"part {ordinal} of {layout.trajectories(generator)} has no scores by "
                f"{' and '.join(map(repr, self._scores.scorers.replicas))}",
                file=self._scores.store.url,
                expected="every part to be scored",
            )
        groups = zip_groups(self.trajectories(generator, ordinal), scores, generator)
        return {group.first_row_id: group for group in groups}


def data_records(store: Store, path: str, schema: pa.Schema) -> Sequence[Record]:
    """The commit records of all parts of the stream in the folder `path`, by ordinal. Raises StreamCorrupt."""
    return list(iter(StreamReader(store, path, schema).next_record, None))
