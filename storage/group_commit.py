"""Many small appends, few commits: a part is committed once it is big enough, or its first row has waited long enough.

    append(rows) ──► pending ── max_rows or max_bytes reached ──► StreamWriter.write, in the caller ──► a part
                        └────── max_seconds since the first ────► StreamWriter.write, in a thread ────► a part

Rows that are pending when the process dies were never there: who appends them goes on from the rows committed.
"""

from contextlib import suppress
from dataclasses import dataclass, field
from threading import Condition, Thread
from time import monotonic
from types import TracebackType

import pyarrow as pa

from storage.record import NO_VERSION
from storage.stream import StreamWriter


@dataclass(kw_only=True)
class _Pending:
    """The part that is being collected."""

    incarnation: int = -1
    due: float = 0.0
    """When it has waited long enough, by the monotonic clock."""
    tables: list[pa.Table] = field(default_factory=list)
    rows: int = 0
    bytes: int = 0
    tokens: int = 0
    versions: list[int] = field(default_factory=list)
    last_group_id: int = -1


class GroupCommit:
    """Collects what is appended to `stream`, and commits it as parts that hold whole appends, in order.

    A part holds no more than `max_rows` rows and `max_bytes` bytes of Arrow memory, unless a single append does, and
    waits no longer than `max_seconds`; with 0 seconds every append is committed before it returns. A thread of its own
    keeps the time; apart from that, it is for one thread alone. After an error nothing more is committed: that error
    is raised again by whatever is called next, also where the thread met it.
    """

    def __init__(self, stream: StreamWriter, *, max_rows: int, max_bytes: int, max_seconds: float) -> None:
        self._stream = stream
        self._max_rows = max_rows
        self._max_bytes = max_bytes
        self._max_seconds = max_seconds
        self._pending = _Pending()
        self._error: BaseException | None = None
        self._closed = False
        # Guards all of the above, and tells the thread that one of them changed.
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
        last_group_id: int = -1,
    ) -> None:
        """Add rows; they are durable, and visible, once their part is committed. See `StreamWriter.write`.

        Rows of another incarnation than those pending begin a part of their own. An invalid table is refused when its
        part is committed. Raises what `StreamWriter.write` raises, and ValueError after `close`.
        """
        with self._changed:
            self._check()
            pending = self._pending
            # Counted once: it takes longer than all the rest here.
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
            pending.last_group_id = last_group_id
            if pending.rows >= self._max_rows or pending.bytes >= self._max_bytes or self._max_seconds <= 0:
                self._commit()

    def flush(self) -> None:
        """Commit what is pending; it is durable, and visible, on return. Raises as `append` does."""
        with self._changed:
            self._check()
            self._commit()

    def close(self) -> None:
        """Commit what is pending, and end the thread. Raises as `append` does. Closing again does nothing."""
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
            # Whoever leaves by an error may have appended half of what belongs together.
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
                last_group_id=pending.last_group_id,
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
