"""Trajectories joined with their annotations, handed to the trainer group by group, each exactly once.

    ║ trajectories/<g> ║ part k ───────────────┐
                                               ├─► zip by row ─► groups of all parts ─► take: oldest weights first
    ║ <pool>/<g>/<k mod A>-of-A ║ part ────────┘

A part is ready once every pool of scorers and teachers has passed it; each row has the score and the teacher of its
source's pools. Ready parts count as scored.

`take` returns the scored group with the oldest weights that has not been taken. A group that took long to generate
comes late in its stream, and is taken before newer groups, because it would soon be too old. `state` is the position
for a checkpoint: the cursors before the first part with groups left, and the groups taken after it. A loader opened
with it continues with the other groups.

A part whose file is damaged, but whose commit record is sound, becomes a `LostPart`. Its record holds the amount that
is lost, and later parts are not delayed.
"""

import heapq
import itertools
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from configs.stored import AnnotatorPools, kind_of
from millrace.rollouts.group_sequence import committed_groups, pass_part
from millrace.rollouts.ledger import Amount
from millrace.rollouts.lineage import Lineage
from millrace.rollouts.scored_group import LostPart, ScoredGroup, merge_annotations, zip_groups
from millrace.rollouts.staleness import consumption_order
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.schema import ANNOTATIONS, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogCursor, LogReader
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader


@dataclass(kw_only=True)
class _Taken:
    """The groups taken from one part."""

    rows: list[int] = field(default_factory=list)
    """First row of each group taken."""
    amount: Amount = field(default_factory=Amount)

    def add(self, group: ScoredGroup | LostPart) -> None:
        self.amount += group.amount()
        if isinstance(group, ScoredGroup):
            self.rows.append(group.first_row_id)


@dataclass(kw_only=True)
class _OpenPart:
    """A zipped part, and the position of its streams before it."""

    number: int
    trajectories_before: LogCursor
    annotations_before: dict[str, LogCursor]
    """By pool: the position in the stream of the annotator whose part it is."""
    taken: _Taken
    waiting: int
    """Groups left to take."""


class _GeneratorStream:
    """One generator's trajectories with their annotations."""

    def __init__(
        self,
        store: Store,
        pools: AnnotatorPools,
        generator: int,
        num_generators: int,
        vocab_size: int,
        lineage: Lineage,
        state: dict[str, Any] | None,
    ) -> None:
        self.generator = generator
        self._store = store
        self._pools = pools
        self._vocab_size = vocab_size
        self._lineage = lineage
        start = LogCursor().to_json()
        annotations = {pool: [start] * count for pool, count in pools.replicas.items()}
        state = state or {"trajectories": start, "annotations": annotations, "taken_of_parts": []}
        self._path = layout.trajectories(generator)
        self._trajectories = StreamReader(store, self._path, TRAJECTORY, LogCursor.from_json(state["trajectories"]))
        self._annotations = {
            pool: [
                StreamReader(
                    store,
                    layout.annotations(pool, generator, number, count),
                    ANNOTATIONS[kind_of(pool)],
                    LogCursor.from_json(cursor),
                )
                for number, cursor in zip(range(count), state["annotations"][pool], strict=True)
            ]
            for pool, count in pools.replicas.items()
        }
        # Of the next part: the position before its annotations, and these, or why they can't be read; by pool.
        self._arrived: dict[str, tuple[LogCursor, Part | PartCorrupt]] = {}
        self._groups = committed_groups(store, generator, num_generators, lineage, self._trajectories.cursor)
        # Parts that may have groups left, in the order of the stream.
        self._parts: deque[_OpenPart] = deque()
        # Part number → groups taken before this loader was opened; for parts that are not open yet.
        self._taken_earlier = {
            entry["part"]: _Taken(rows=entry["rows"], amount=Amount(rollouts=entry["rollouts"], tokens=entry["tokens"]))
            for entry in state["taken_of_parts"]
        }
        # Reads the log ahead of the annotations, from the first call of `oldest_unscored` on.
        self._ahead: LogReader | None = None
        self._unscored: list[Record] = []

    def refill(self) -> Iterator[tuple[_OpenPart, ScoredGroup | LostPart]]:
        """Zips the parts scored since the last call, and yields their groups that were not taken."""
        while (part_and_groups := self._next()) is not None:
            part, groups = part_and_groups
            self._parts.append(part)
            yield from ((part, group) for group in groups)
        self._trim()

    def _next(self) -> tuple[_OpenPart, Sequence[ScoredGroup | LostPart]] | None:
        """The next part with its annotations, and its groups that were not taken."""
        number = self._trajectories.cursor.part
        for pool, readers in self._annotations.items():
            reader = readers[layout.annotator_of_part(number, len(readers))]
            if pool not in self._arrived and not self._arrive(pool, reader):
                return None
        arrived, self._arrived = self._arrived, {}
        trajectories_before = self._trajectories.cursor
        groups: Sequence[ScoredGroup | LostPart]
        group_ids: list[int] | None
        try:
            whole, record = self._zip({pool: _readable(part) for pool, (_, part) in arrived.items()})
            taken = self._taken_earlier.pop(number, _Taken())
            groups = [group for group in whole if group.first_row_id not in taken.rows]
            group_ids = [group.group_id for group in whole]
        except PartCorrupt as error:
            if (damaged := self._trajectories.next_record()) is None:
                raise self._missing(number) from error
            record = damaged
            taken = self._taken_earlier.pop(number, _Taken())
            left = Amount(rollouts=record.rows, tokens=record.tokens) - taken.amount
            lost = LostPart(
                generator=self.generator,
                record=record,
                left=left,
                num_groups=len(record.group_ids) - len(taken.rows),
                reason=str(error),
            )
            groups, group_ids = [lost] if left.rollouts else [], None
        if self._lineage.holds(record.incarnation, record.max_policy_version):
            pass_part(self._groups, self._path, record, group_ids)
        part = _OpenPart(
            number=number,
            trajectories_before=trajectories_before,
            annotations_before={pool: before for pool, (before, _) in arrived.items()},
            taken=taken,
            waiting=len(groups),
        )
        return part, groups

    def _arrive(self, pool: str, reader: StreamReader) -> bool:
        """Whether the pool has passed the next part; then its annotations are in `_arrived`."""
        before = reader.cursor
        annotations: Part | PartCorrupt | None
        try:
            annotations = reader.next()
        except PartCorrupt as error:
            reader.next_record()
            annotations = error
        if annotations is not None:
            self._arrived[pool] = before, annotations
        return annotations is not None

    def _zip(self, annotations: Mapping[str, Part]) -> tuple[list[ScoredGroup], Record]:
        trajectories = self._trajectories.next()
        if trajectories is None:
            raise self._missing(self._trajectories.cursor.part)
        record = trajectories.record
        if record.vocab_size not in (0, self._vocab_size):
            raise StreamCorrupt(
                f"{self._path}/{record.file}",
                f"its tokens are of a vocabulary of {record.vocab_size}, but the policy's has {self._vocab_size}",
                record.seq,
            )
        merged = merge_annotations(trajectories, annotations, self._pools, self.generator)
        return zip_groups(trajectories, merged, self.generator), record

    def _missing(self, part: int) -> StreamCorrupt:
        return StreamCorrupt(self._path, f"part {part} is missing, but it was scored")

    def oldest_unscored(self) -> int | None:
        """Oldest version in committed parts that are not zipped yet and whose weights exist; None without one."""
        if self._ahead is None:
            self._ahead = LogReader(self._store, self._path, self._trajectories.cursor)
        self._unscored += [record for record in iter(self._ahead.next, None) if record.kind == "data"]
        first = self._trajectories.cursor.part
        self._unscored = [record for record in self._unscored if record.part >= first]
        versions = [
            record.min_policy_version
            for record in self._unscored
            if self._lineage.holds(record.incarnation, record.max_policy_version)
        ]
        return min(versions, default=None)

    def take(self, part: _OpenPart, group: ScoredGroup | LostPart) -> None:
        part.taken.add(group)
        part.waiting -= 1
        self._trim()

    def _trim(self) -> None:
        while self._parts and not self._parts[0].waiting:
            self._parts.popleft()

    def state(self) -> dict[str, Any]:
        cursors = {pool: [reader.cursor for reader in readers] for pool, readers in self._annotations.items()}
        befores = [(part.number, part.annotations_before) for part in self._parts]
        befores.append((self._trajectories.cursor.part, {pool: before for pool, (before, _) in self._arrived.items()}))
        for number, by_pool in reversed(befores):
            for pool, before in by_pool.items():
                cursors[pool][layout.annotator_of_part(number, len(cursors[pool]))] = before
        # The position before the first part with groups left, and the groups taken after it.
        front = self._parts[0].trajectories_before if self._parts else self._trajectories.cursor
        taken_after = [(part.number, part.taken) for part in self._parts] + list(self._taken_earlier.items())
        return {
            "trajectories": front.to_json(),
            "annotations": {pool: [cursor.to_json() for cursor in of_pool] for pool, of_pool in cursors.items()},
            "taken": sum((taken.amount for _, taken in taken_after), Amount()).to_json(),
            "taken_of_parts": [
                {"part": number, "rows": [*taken.rows], **taken.amount.to_json()}
                for number, taken in taken_after
                if taken.amount.rollouts
            ],
        }


def _readable(annotations: Part | PartCorrupt) -> Part:
    if isinstance(annotations, PartCorrupt):
        raise annotations
    return annotations


def consumed_by(state: Sequence[dict[str, Any]]) -> list[Amount]:
    """Amount taken, by generator, according to a `RolloutLoader.state`.

    Raises KeyError, TypeError or ValueError if the state is damaged.
    """
    cursors = (LogCursor.from_json(stream["trajectories"]) for stream in state)
    return [
        Amount(rollouts=cursor.rows, tokens=cursor.tokens) + Amount.from_json(stream["taken"])
        for cursor, stream in zip(cursors, state, strict=True)
    ]


class RolloutLoader:
    """The scored groups of a run, for a trainer of this `lineage`, after `state`, an earlier result of `state()`."""

    def __init__(
        self,
        store: Store,
        *,
        pools: AnnotatorPools,
        num_generators: int,
        vocab_size: int,
        lineage: Lineage,
        state: list[dict[str, Any]] | None,
    ) -> None:
        states: Sequence[dict[str, Any] | None] = [None] * num_generators if state is None else state
        self._lineage = lineage
        self._streams = [
            _GeneratorStream(store, pools, g, num_generators, vocab_size, lineage, states[g])
            for g in range(num_generators)
        ]
        # (age, tie-breaker, its stream, its part, group): a heap.
        self._waiting: list[tuple[tuple[int, int], int, _GeneratorStream, _OpenPart, ScoredGroup | LostPart]] = []
        self._count = itertools.count()

    def _refill(self) -> None:
        """Reads the parts scored since the last call."""
        for stream in self._streams:
            for part, group in stream.refill():
                heapq.heappush(self._waiting, (self._age(group), next(self._count), stream, part, group))

    def take(self) -> ScoredGroup | LostPart | None:
        """Takes the scored group or lost part with the oldest weights; None if nothing is scored.

        Groups whose weights no longer exist come first. Raises StreamCorrupt where a commit record is damaged, or the
        streams match neither each other nor the policy's vocabulary, and LedgerMismatch where a prompt was skipped or
        repeated.
        """
        self._refill()
        if not self._waiting:
            return None
        _, _, stream, part, group = heapq.heappop(self._waiting)
        stream.take(part, group)
        return group

    def oldest_unscored(self) -> int | None:
        """Oldest version that sampled an unscored group; None if all groups are scored. Raises as `take`."""
        self._refill()
        versions = [version for stream in self._streams if (version := stream.oldest_unscored()) is not None]
        return min(versions, default=None)

    def consumed(self) -> list[Amount]:
        """Amount taken since the run began, by generator, as the cursors count it."""
        return consumed_by(self.state())

    def state(self) -> list[dict[str, Any]]:
        """Returns the position as JSON for a checkpoint. Later calls of `take` don't change it."""
        return [stream.state() for stream in self._streams]

    def _age(self, group: ScoredGroup | LostPart) -> tuple[int, int]:
        """The order in which groups are taken: oldest weights, then group number."""
        if isinstance(group, LostPart):
            record = group.record
            exists = self._lineage.holds(record.incarnation, record.max_policy_version)
            return consumption_order(record.min_policy_version if exists else -1, record.last_group_id)
        exists = self._lineage.holds(group.incarnation, group.part_max_policy_version)
        return consumption_order(group.min_policy_version if exists else -1, group.group_id)
