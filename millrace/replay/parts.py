"""Groups of a stored run with their annotations, by the id of their first row: in any order, each verified when read.

(generator, row) ─► which part? by the commit records ─┬─► ║ trajectories/<g> ║ part k ───────────────┐
                                                       └─► ║ <pool>/<g>/<k mod A>-of-A ║ ─────────────┴─► zip
                         cache: the parts used last ◄───────────────────────────────────────────────────┘
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from configs.stored import AnnotationKind, AnnotatorPools, kind_of
from millrace.errors import ReplayError
from millrace.rollouts.scored_group import ScoredGroup, merge_annotations, zip_groups
from millrace.runs.record import latest_attempt
from storage import layout
from storage.errors import StreamCorrupt
from storage.schema import ANNOTATIONS, TRAJECTORY
from storage.stores.base import Store
from storage.streams.merged import PartFinder
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, read_part

CACHED_PARTS = 32
"""Parts kept in memory, those used last; those of a local run are mapped files."""


@dataclass(frozen=True, kw_only=True)
class Scores:
    """The place of the scores of a run's trajectories: in the run itself, or in a replay that scored them anew."""

    store: Store
    pools: AnnotatorPools
    """The scorers there, and the run's teachers."""

    @classmethod
    def of(cls, store: Store) -> "Scores":
        """The scores in `store`, by the config of its latest attempt."""
        return cls(store=store, pools=AnnotatorPools.of(latest_attempt(store).config))


class ScoredParts:
    """The trajectories of the run in `store` with their teachers' rows, and their `scores`, by default the run's own.

    With `rows`, by generator, knows only the parts with these rows.
    """

    def __init__(
        self, store: Store, scores: Scores | None = None, rows: Mapping[int, Sequence[int]] | None = None
    ) -> None:
        self.store = store
        self._scores = scores or Scores.of(store)
        self._knows_all = rows is None
        self.records = [
            data_records(store, layout.trajectories(g), TRAJECTORY)
            if rows is None
            else _records_of_rows(store, layout.trajectories(g), rows.get(g, ()))
            for g in range(latest_attempt(store).config["generation"]["replicas"])
        ]
        """[generators] the commit records of the parts, by ordinal."""
        self._by_part = [{record.part: record for record in records} for records in self.records]
        self._whole_log, self._finder = cache(data_records), cache(PartFinder)
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
        ordinals = np.array([record.part for record in self.records[generator]])
        parts: npt.NDArray[np.int64] = ordinals[np.searchsorted(starts, first_row_ids, side="right") - 1]
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
        for record in self.records[generator]:
            scores = self.scores(generator, record.part, ["reward"])
            unscored = np.full(record.rows, np.nan, dtype=np.float32)
            rewards.append(unscored if scores is None else scores["reward"].to_numpy())
        return np.concatenate(rewards)

    def scores(self, generator: int, ordinal: int, columns: Sequence[str] | None = None) -> pa.Table | None:
        """The scores of a part's rows; None if a pool has not scored it. Raises PartCorrupt or PartRemoved."""
        merged = self._annotations(self._scores.pools.of_kind("scores"), generator, ordinal, columns)
        return None if merged is None else merged["scores"]

    def is_scored(self, generator: int, ordinal: int) -> bool:
        """Whether all pools of scorers have scored a part."""
        return all(self._record_of(pool, generator, ordinal)[2] for pool in self._scores.pools.of_kind("scores"))

    def _annotations(
        self, pools: Iterable[str], generator: int, ordinal: int, columns: Sequence[str] | None = None
    ) -> dict[AnnotationKind, pa.Table] | None:
        """The annotations of a part's rows by these pools, merged by kind; None if one of them has not passed it."""
        parts: dict[str, Part] = {}
        for pool in pools:
            store, path, record = self._record_of(pool, generator, ordinal)
            if record is None:
                return None
            parts[pool] = Part(record=record, table=read_part(store, path, ANNOTATIONS[kind_of(pool)], record, columns))
        trajectories = Part(record=self._by_part[generator][ordinal], table=pa.table({}))
        if len(parts) > 1:
            trajectories = self.trajectories(generator, ordinal, ["source"])
        return merge_annotations(trajectories, parts, self._scores.pools, generator)

    def _record_of(self, pool: str, generator: int, ordinal: int) -> tuple[Store, str, Record | None]:
        """The stream of a pool's annotations of a part, and their commit record."""
        store = self._scores.store if kind_of(pool) == "scores" else self.store
        count = self._scores.pools.replicas[pool]
        path = layout.annotations_of_part(pool, generator, ordinal, count)
        number = layout.num_annotated_parts(layout.annotator_of_part(ordinal, count), ordinal, count)
        if not self._knows_all:
            return store, path, self._finder(store, path).first(lambda record: record.part >= number)
        records = self._whole_log(store, path, ANNOTATIONS[kind_of(pool)])
        return store, path, records[number] if number < len(records) else None

    def trajectories(self, generator: int, ordinal: int, columns: Sequence[str] | None = None) -> Part:
        """The trajectories of a part. Raises PartCorrupt or PartRemoved."""
        record = self._by_part[generator][ordinal]
        table = read_part(self.store, layout.trajectories(generator), TRAJECTORY, record, columns)
        return Part(record=record, table=table)

    def _read_groups(self, generator: int, ordinal: int) -> dict[int, ScoredGroup]:
        """The groups of a part by the row_id of their first row."""
        pools = self._scores.pools.replicas
        merged = self._annotations(pools, generator, ordinal)
        if merged is None:
            raise ReplayError(
                f"part {ordinal} of {layout.trajectories(generator)} is not annotated by "
                f"{' and '.join(map(repr, pools))}",
                file=self._scores.store.url,
                expected="every part to be annotated",
            )
        groups = zip_groups(self.trajectories(generator, ordinal), merged, generator)
        return {group.first_row_id: group for group in groups}


def data_records(store: Store, path: str, schema: pa.Schema) -> Sequence[Record]:
    """The commit records of all parts of the stream in the folder `path`, by ordinal. Raises StreamCorrupt."""
    return list(iter(StreamReader(store, path, schema).next_record, None))


def _records_of_rows(store: Store, path: str, rows: Iterable[int]) -> Sequence[Record]:
    """The commit records of the parts with these rows of the stream in the folder `path`, by ordinal."""
    finder = PartFinder(store, path)

    def part_with(row: int) -> Record | None:
        return finder.first(lambda record: record.first_row_id + record.rows > row)

    return list({part.part: part for part in map(part_with, sorted(rows)) if part is not None}.values())
