"""Groups of a stored run with their scores, by the id of their first row: in any order, each verified when read.

(generator, row) ─► which part? by the commit records ─┬─► ║ trajectories/<g> ║ part k ───────────────┐
                                                       └─► ║ scores/<reward>/<g>/<k mod S>-of-S ║ ───┴─► zip
                         cache: the parts used last ◄──────────────────────────────────────────────────┘
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.errors import ReplayError
from millrace.rollouts.scored_group import ScoredGroup, zip_groups
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
    reward: str
    num_scorers: int = 1

    def path(self, generator: int, part: int) -> str:
        """The stream that holds the scores of that part of a generator's trajectories."""
        scorer = layout.scorer_of_part(part, self.num_scorers)
        return layout.scores(self.reward, generator, scorer, self.num_scorers)


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
            scores = self.scores(generator, ordinal, ["row_id", "reward"])
            unscored = np.full(record.rows, np.nan, dtype=np.float32)
            rewards.append(unscored if scores is None else scores.table["reward"].to_numpy())
        return np.concatenate(rewards)

    def scores(self, generator: int, ordinal: int, columns: Sequence[str] | None = None) -> Part | None:
        """The scores of a part; None if there are none. Raises PartCorrupt or PartRemoved."""
        path, num_scorers = self._scores.path(generator, ordinal), self._scores.num_scorers
        if path not in self._score_records:
            self._score_records[path] = data_records(self._scores.store, path, SCORE)
        number = layout.num_scored_parts(layout.scorer_of_part(ordinal, num_scorers), ordinal, num_scorers)
        if number >= len(self._score_records[path]):
            return None
        record = self._score_records[path][number]
        return Part(record=record, table=read_part(self._scores.store, path, SCORE, record, columns))

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
                f"part {ordinal} of {layout.trajectories(generator)} has no scores by {self._scores.reward!r}",
                file=self._scores.store.url,
                expected="every part to be scored",
            )
        trajectories, scores_path = self.trajectories(generator, ordinal), self._scores.path(generator, ordinal)
        groups = zip_groups(trajectories, scores, generator, scores_path)
        return {group.first_row_id: group for group in groups}


def data_records(store: Store, path: str, schema: pa.Schema) -> Sequence[Record]:
    """The commit records of all parts of the stream in the folder `path`, by ordinal. Raises StreamCorrupt."""
    return list(iter(StreamReader(store, path, schema).next_record, None))
