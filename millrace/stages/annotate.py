"""The loop of every stage that annotates trajectories: for each row of a stream one row of another.

    ║ trajectories/0 ║ ─► part k ─┐                            ┌─► ║ <pool>/0/s-of-S ║ part k div S
    ║ trajectories/1 ║ ─► part k ─┴─► k mod S = s? ─► rows ────┴─► ║ <pool>/1/s-of-S ║ part k div S

Annotator s of a pool of S reads every generator's trajectories, waits for the next part of its share, and writes one
part per part of trajectories. With j parts in its own stream, trajectory part j·S + s is next. Each row of a part that
can't be read gets an error, so that the streams stay aligned.

An annotator that waits for services submits parts ahead. Parts are committed in their order. When the stage is asked to
drain, it commits the parts that were submitted.
"""

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import pyarrow as pa

from configs.stored import AnnotationKind
from millrace.runtime.stage import Stage
from storage import layout
from storage.errors import PartCorrupt
from storage.failpoints import failpoint
from storage.schema import ANNOTATIONS, TRAJECTORY
from storage.stores.base import Store
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader, StreamWriter


class PendingRows(Protocol):
    """The rows of a submitted part."""

    @property
    def is_ready(self) -> bool:
        """Whether `collect` does not wait for a service."""

    def collect(self) -> pa.Table:
        """Returns one row per row of the part, in its order."""


class Annotator(Protocol):
    """Computes the rows of a stage."""

    kind: AnnotationKind
    """Kind of the rows: scores, or a teacher's log-probabilities."""

    def submit(self, generator: int, part: Part) -> PendingRows:
        """Begins to compute the rows of a part of a generator's trajectories."""

    def unread_rows(self, record: Record, error: str) -> pa.Table:
        """Returns the rows of a part of trajectories that can't be read, each with the error."""

    def has_room(self) -> bool:
        """Whether a generator's next part should be submitted while others of it are pending."""

    def on_commit(self, part: Part, rows: pa.Table) -> None:
        """Is called after the rows of a readable part are committed."""


def annotate(
    stage: Stage,
    annotator: Annotator,
    *,
    source: Store | None = None,
    is_wanted: Callable[[int, int], bool] | None = None,
) -> int:
    """Annotates until the stage is asked to drain. Returns the number of rows in this process's streams.

    In a replay, `source` has the trajectories, and `is_wanted` says by generator and ordinal which parts to annotate.
    The first one that is not wanted is a stream's end, and the stage ends with the streams.
    """
    generators = range(stage.config.generation.replicas)
    streams = [_Stream(stage, annotator, generator, source or stage.store, is_wanted) for generator in generators]

    def look() -> bool:
        submitted = [stream.submit_next() for stream in streams]
        return any(submitted) or any(stream.is_ready for stream in streams)

    def has_more() -> bool:
        if is_wanted is not None and not look() and not any(stream.pending for stream in streams):
            return False
        return stage.wait(look, why="waiting for trajectories")

    while has_more():
        for stream in streams:
            while stream.is_ready:
                stream.commit_next()
    for stream in streams:
        # Answers of services that were asked are paid for.
        while stream.pending:
            stream.commit_next()
    return sum(stream.rows.rows for stream in streams)


@dataclass(kw_only=True)
class _PendingPart:
    """A part of trajectories whose rows are not committed."""

    record: Record
    part: Part | None = None
    rows: PendingRows | None = None
    """None, as is `part`, if the part can't be read."""
    error: str = ""
    """Why it can't be read."""


class _Stream:
    """One generator's trajectories and this process's stream of rows for them."""

    def __init__(
        self,
        stage: Stage,
        annotator: Annotator,
        generator: int,
        source: Store,
        is_wanted: Callable[[int, int], bool] | None,
    ) -> None:
        pools = stage.config.annotators
        pool, self._member = pools.annotator(annotator.kind, stage.replica)
        self._size = pools.replicas[pool]
        path, schema = layout.annotations(pool, generator, self._member, self._size), ANNOTATIONS[annotator.kind]
        self.rows = StreamWriter(stage.store, path, schema, writer=f"{stage.name}-{stage.replica}")
        self._trajectories = StreamReader(source, layout.trajectories(generator), TRAJECTORY)
        self._stage, self._annotator, self._generator, self._is_wanted = stage, annotator, generator, is_wanted
        self.pending: deque[_PendingPart] = deque()
        """The parts that come next, in their order."""

    @property
    def is_ready(self) -> bool:
        """Whether the next part can be committed without waiting for a service."""
        if not self.pending:
            return False
        rows = self.pending[0].rows
        return rows is None or rows.is_ready

    def submit_next(self) -> bool:
        """Submits the next part of this process's share, and more while there is room; whether there was one."""
        found = False
        while (not self.pending or self._annotator.has_room()) and self._skip_others():
            if self._is_wanted is not None and not self._is_wanted(self._generator, self._trajectories.cursor.part):
                break
            try:
                part = self._trajectories.next()
            except PartCorrupt as error:
                record = self._trajectories.next_record()
                assert record is not None, "the error came from this very record"
                self.pending.append(_PendingPart(record=record, error=str(error)))
            else:
                if part is None:
                    break
                rows = self._annotator.submit(self._generator, part)
                self.pending.append(_PendingPart(record=part.record, part=part, rows=rows))
            found = True
        return found

    def _skip_others(self) -> bool:
        """Passes the parts of other members of the pool; whether all parts before the next own one are committed."""
        ordinal = self.rows.parts + len(self.pending)
        while self._trajectories.cursor.part < layout.annotated_part(self._member, ordinal, self._size):
            if self._trajectories.next_record() is None:
                return False
        return True

    def commit_next(self) -> None:
        """Commits the rows of the next part."""
        pending = self.pending[0]
        if pending.part is None or pending.rows is None:
            self._stage.log(f"no {self._stage.name} rows for {pending.record.rows} trajectories: {pending.error}")
            self._commit(self._annotator.unread_rows(pending.record, pending.error), pending.record)
        else:
            with self._stage.busy(self._stage.name):
                rows = pending.rows.collect()
            failpoint(f"{self._stage.name}.before_commit")
            self._commit(rows, pending.record)
            self._annotator.on_commit(pending.part, rows)
        self.pending.popleft()

    def _commit(self, rows: pa.Table, record: Record) -> None:
        stage = self._stage
        with stage.busy("commit"):
            self.rows.write(
                rows,
                tokens=record.tokens,
                min_policy_version=record.min_policy_version,
                max_policy_version=record.max_policy_version,
            )
        stage.update_status(
            rollouts=stage.value("rollouts") + rows.num_rows,
            errors=stage.value("errors") + sum(status in ("timeout", "error") for status in rows["status"].to_pylist()),
            tokens=stage.value("tokens") + record.tokens,
        )
