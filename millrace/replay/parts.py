"""Groups of a stored run with their scores, by the id of their first row: in any order, each verified when read.

(generator, row) ─► which part? by the commit records ─┬─► ║ trajectories/<g> ║ part k ───────────────┐
                                                       └─► ║ scores/<reward>/<g>/<k mod S>-of-S ║ ───┴─► zip
                         cache: the parts used last, up to a number of bytes ◄─────────────────────────┘
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass

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
from storage.streams.stream import Part, StreamReader, read_part, read_removed

CACHE_BYTES = 1 << 30
"""Arrow memory of the cached parts; those of a local run are mapped files, which take no memory of their own."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """Where the scores of a run's trajectories are: in the run itself, or in a replay that scored them anew."""

    store: Store
    reward: str
    num_scorers: int = 1

    def path(self, generator: int, part: int) -> str:
        """The stream that holds the scores of that part of a generator's trajectories."""
        scorer = layout.scorer_of_part(part, self.num_scorers)
        return layout.scores(self.reward, generator, scorer, self.num_scorers)


class ScoredParts:
    """The trajectories of `num_generators` generators in `store`, with their `scores`."""

    def __init__(self, store: Store, num_generators: int, scores: Scores, cache_bytes: int = CACHE_BYTES) -> None:
        self._store = store
        self._scores = scores
        self._cache_bytes = cache_bytes
        self.records = [data_records(store, layout.trajectories(g), TRAJECTORY) for g in range(num_generators)]
        """[generators] the commit records of its parts, by ordinal."""
        self._first_rows = [np.array([record.first_row_id for record in records]) for records in self.records]
        self._score_records: dict[str, Sequence[Record]] = {}
        self._cache: OrderedDict[tuple[int, int], tuple[dict[int, ScoredGroup], int]] = OrderedDict()
        """By generator and ordinal: the groups of a part by the row_id of their first row, and their bytes."""
        self.parts_read = 0
        """How often a part was read from the store."""

    def parts_of(self, generator: int, first_row_ids: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """Ordinals of the parts that hold these rows of a generator's stream. Raises ReplayError if it has none."""
        if generator >= len(self.records) or not self.records[generator]:
            raise ReplayError(
                f"{self._store.url}: the run has no trajectories of its own in {layout.trajectories(generator)}, as a "
                "replay has none; expected the run in which they were generated"
            )
        found: npt.NDArray[np.int64] = np.searchsorted(self._first_rows[generator], first_row_ids, side="right") - 1
        return found

    def removed(self, generator: int) -> int:
        """How many of a generator's first parts `millrace gc` has removed, counting those that lost only scores."""
        removed = read_removed(self._store, layout.trajectories(generator))
        scorers = self._scores.num_scorers
        without_scores = [
            layout.scored_part(scorer, gone - 1, scorers) + 1
            for scorer in range(scorers)
            if (gone := read_removed(self._scores.store, self._scores.path(generator, scorer)))
        ]
        return max(removed, *without_scores, 0)

    def group(self, generator: int, first_row_id: int) -> ScoredGroup:
        """The group whose first row this is.

        Raises StreamCorrupt if it can't be read or does not exist, PartRemoved, and ReplayError if it has no scores.
        """
        ordinal = int(self.parts_of(generator, np.array([first_row_id]))[0])
        key = generator, ordinal
        groups = self._cache[key][0] if key in self._cache else self._read(generator, ordinal)
        self._cache.move_to_end(key)
        if first_row_id not in groups:
            raise StreamCorrupt(layout.trajectories(generator), f"no group begins with row {first_row_id}")
        return groups[first_row_id]

    def rewards(self, generator: int) -> npt.NDArray[np.float32]:
        """[rows] reward of every scored row of a generator's stream, NaN where the verifier failed."""
        records = self.records[generator]
        found = np.full(sum(record.rows for record in records), np.nan, dtype=np.float32)
        for ordinal, record in enumerate(records):
            score = self._score_record(generator, ordinal)
            if score is not None:
                path = self._scores.path(generator, ordinal)
                table = read_part(self._scores.store, path, SCORE, score, columns=["row_id", "reward"])
                found[record.first_row_id : record.first_row_id + record.rows] = table["reward"].to_numpy()
        return found

    def _read(self, generator: int, ordinal: int) -> dict[int, ScoredGroup]:
        score = self._score_record(generator, ordinal)
        if score is None:
            raise ReplayError(
                f"{self._scores.store.url}: part {ordinal} of {layout.trajectories(generator)} has no scores by the "
                f"reward {self._scores.reward!r}; expected every part to be scored"
            )
        record = self.records[generator][ordinal]
        trajectories = read_part(self._store, layout.trajectories(generator), TRAJECTORY, record)
        path = self._scores.path(generator, ordinal)
        scored = read_part(self._scores.store, path, SCORE, score)
        self.parts_read += 1
        groups = zip_groups(Part(record=record, table=trajectories), Part(record=score, table=scored), generator, path)
        part = {group.first_row_id: group for group in groups}
        self._cache[generator, ordinal] = part, trajectories.nbytes + scored.nbytes
        while len(self._cache) > 1 and sum(size for _, size in self._cache.values()) > self._cache_bytes:
            self._cache.popitem(last=False)
        return part

    def _score_record(self, generator: int, ordinal: int) -> Record | None:
        path = self._scores.path(generator, ordinal)
        if path not in self._score_records:
            self._score_records[path] = data_records(self._scores.store, path, SCORE)
        scorers = self._scores.num_scorers
        records = self._score_records[path]
        place = layout.num_scored_parts(layout.scorer_of_part(ordinal, scorers), ordinal, scorers)
        return records[place] if place < len(records) else None


def data_records(store: Store, path: str, schema: pa.Schema) -> Sequence[Record]:
    """The commit records of all parts of the stream in the folder `path`, by ordinal. Raises StreamCorrupt."""
    return list(iter(StreamReader(store, path, schema).next_record, None))
