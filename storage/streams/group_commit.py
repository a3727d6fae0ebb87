"""Many small appends, few commits: a part is committed once it is big enough, or its oldest row has waited long enough.

    append(rows) ──► pending ── max_rows or max_bytes reached ──► StreamWriter.write, in the caller ──► a part
                        └────── max_seconds since the first ────► StreamWriter.write, in a thread ────► a part

Rows that are pending when the process dies are lost: the caller continues from the committed rows.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from time import monotonic
from types import TracebackType

import pyarrow as pa

from storage.streams.record import NO_VERSION
from storage.streams.stream import StreamWriter


@dataclass(kw_only=True)
class _Pending:
    """The part being collected."""

    incarnation: int = -1
    due: float = 0.0
    """When it must be committed, by the monotonic clock."""
    tables: list[pa.Table] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    tokens: int = 0
    versions: list[int] = field(default_factory=list)
    group_ids: list[int] = field(default_factory=list)
    last_group_id: int = -1
    missing_groups: Sequence[int] = ()


class GroupCommit:
    """Collects appended tables and commits them to `stream` in order, in parts of whole appends.

    A part has at most `max_rows` rows and `max_bytes` bytes of Arrow memory, unless a single append exceeds them, and
    waits at most `max_seconds`; with 0, every append is committed before it returns. A background thread keeps the
    time; otherwise use it from one thread only. After an error nothing more is committed, and every later call raises
    that error again, even if it happened in the background thread.
    """

    def __init__(self, stream: StreamWriter, *, max_rows: int, max_bytes: int, max_seconds: float) -> None:
        self._stream = stream
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._pending = _Pending()
        self._error: BaseException | None = None
        self._closed = False
        # Guards all of the above, and wakes the thread when one of them changes.
        self._changed = Condition()
        self._thread: Thread | None = None
        if max_seconds > 0:
            self._thread = Thread(target=self._keep_time, name="group commit", daemon=True)
            self._thread.start()

    @property
    def rows(self) -> int:
        """Rows committed and pending: the row_id of a trajectory stream's next row."""
        with self._changed:
            return self._stream.rows + self._pending.rows

    def append(
        self,
        table: pa.Table,
        *,
        tokens: int,
        min_policy_version: int = NO_VERSION,
        max_policy_version: int = NO_VERSION,
        incarnation: int = -1,
        group_ids: Sequence[int] = (),
        last_group_id: int = -1,
        missing_groups: Sequence[int] = (),
    ) -> None:
        """Add rows; they are durable and visible once their part is committed. See `StreamWriter.write`.

        A change of incarnation starts a new part. An invalid table is refused when its part is committed.
        Raises what `StreamWriter.write` raises, and ValueError after `close`.
        """
        with self._changed:
            self._check()
            pending = self._pending
            # Computed once: it takes longer than everything else here.
            size = table.nbytes
            fits = pending.rows + table.num_rows <= self._max_rows and pending.bytes + size <= self._max_bytes
            if not fits or incarnation != pending.incarnation:
                self._commit()
            if not self._pending.tables:
                self._pending = _Pending(incarnation=incarnation, due=monotonic() + self._max_seconds)
                self._changed.notify()
            pending = self._pending
            pending.tables.append(table)
            pending.rows += table.num_rows
            pending.bytes += size
            pending.tokens += tokens
            pending.versions += [
                version for version in (min_policy_version, max_policy_version) if version != NO_VERSION
            ]
            pending.group_ids += group_ids
            pending.last_group_id, pending.missing_groups = last_group_id, missing_groups
            if pending.rows >= self._max_rows or pending.bytes >= self._max_bytes or self._max_seconds <= 0:
                self._commit()

    def flush(self) -> None:
        """Commit the pending rows; on return they are durable and visible. Raises as `append` does."""
        with self._changed:
            self._check()
            self._commit()

    def close(self) -> None:
        """Commit the pending rows and stop the thread. Raises as `append` does. Closing twice is fine."""
        if self._closed:
            return
        try:
            self.flush()
        finally:
            self._end()

    def __enter__(self) -> "GroupCommit":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        else:
            # After an error, the caller may have appended only half of what belongs together.
            self._end()

    def _check(self) -> None:
        if self._error is not None:
            raise self._error
        if self._closed:
            raise ValueError("nothing can be appended after close")

    def _commit(self) -> None:
        pending = self._pending
        if not pending.tables:
            return
        try:
            self._stream.write(
                pa.concat_tables(pending.tables),
                tokens=pending.tokens,
                min_policy_version=min(pending.versions, default=NO_VERSION),
                max_policy_version=max(pending.versions, default=NO_VERSION),
                incarnation=pending.incarnation,
                group_ids=pending.group_ids,
                last_group_id=pending.last_group_id,
                missing_groups=pending.missing_groups,
            )
        except BaseException as error:
            # Whether the part was committed may be unknown; committing it again might store it twice.
            self._error = error
            raise
        self._pending = _Pending()

    def _keep_time(self) -> None:
        with self._changed:
            while not self._closed and self._error is None:
                if not self._pending.tables:
                    self._changed.wait()
                elif (seconds := self._pending.due - monotonic()) > 0:
                    self._changed.wait(seconds)
                else:
                    # Kept as `_error`, and raised in the caller's own thread.
                    with suppress(Exception):
                        self._commit()

    def _end(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        if self._thread:
            self._thread.join()
