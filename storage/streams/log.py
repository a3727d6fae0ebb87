"""The commit log: a stream, or the trainer's checkpoints, consist of exactly what their log names.

    log/000…000   log/000…001   log/000…002   log/000…003   log/000…004      each one put-if-absent, got by number,
    fence         data          data          fence         data             never listed, never overwritten
    epoch 0       epoch 0       epoch 0       epoch 1       epoch 1
         └───prev──────┘ └───prev────┘ └───prev────┘ └───prev────┘           prev: sha256 of the record before

    opening a writer    read to the head ──► put fence, epoch + 1 ──► created: the log is mine
                              ▲                     └── another opening writer's is there ──┐
                              └─────────────────────────────────────────────────────────────┘
    committing          put record at the head ──► created, or found my own nonce (a lost reply): committed
                                               └── a higher epoch is there: Fenced, stop for good
    reading             get the next number ──► a record: verify prev, epoch, shape; advance
                                               └── nothing there ──► no news, or a hole if a snapshot is further on

To find the head, a reader starts at a snapshot (`storage.streams.snapshot`), so long logs cost as much as short ones.

A writer can commit only under the number after its last record. Once a newer writer's fence is there, a zombie cannot
get past it, however long it slept. So no record is older than the fence before it.
"""

import dataclasses
import hashlib
import uuid
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from storage import layout
from storage.errors import Fenced, NotInStore, StreamCorrupt, damaged_record
from storage.stores.base import Store
from storage.streams import snapshot
from storage.streams.files import Source
from storage.streams.record import NO_VERSION, Kind, Record, decode, encode

_LOOKS_AT_A_HOLE = 4
"""Retries for a record that should exist: some stores cache a "not found" for a while."""
_LOOKED_AT_BEYOND = (1, 2, 4, 8)
"""How far behind a record that is not there a later one is looked for."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LogCursor:
    """A position in a log, with totals of what comes before it. `LogCursor()` is the start."""

    seq: int = 0
    """Number of the next record."""
    prev: str = ""
    """sha256 (hex) of the last record's bytes before the cursor; '' at the start."""
    epoch: int = -1
    """Epoch of the last fence; -1 before the first."""
    part: int = 0
    """Data records passed: the ordinal of the next one."""
    rows: int = 0
    """Rows of those parts."""
    tokens: int = 0
    """Response tokens of those parts."""
    min_policy_version: int = NO_VERSION
    """Oldest policy version behind those parts; -1 if none has one."""
    max_policy_version: int = NO_VERSION
    """Newest policy version behind those parts; -1 if none has one."""
    ended: bool = False
    """Whether the last record is an end, and no newer writer has taken over since."""

    def to_json(self) -> dict[str, Any]:
        """A JSON object from which `from_json` makes an equal cursor."""
        return dataclasses.asdict(self)

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "LogCursor":
        """The cursor that `to_json` wrote. Raises ValueError unless `values` has exactly its fields and types."""
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        fits = set(values) == set(types) and all(type(values[name]) is types[name] for name in types)
        if not fits or values["seq"] < 0:
            raise ValueError(f"not a log cursor: {values!r}")
        return cls(**values)

    def after(self, record: Record, digest: str) -> "LogCursor":
        """The cursor behind `record`, whose bytes have the sha256 `digest`."""
        # Records of other kinds have no rows, and no versions.
        versions = [record.min_policy_version, self.min_policy_version]
        return LogCursor(
            seq=self.seq + 1,
            prev=digest,
            epoch=record.epoch,
            part=self.part + (record.kind == "data"),
            rows=self.rows + record.rows,
            tokens=self.tokens + record.tokens,
            min_policy_version=min((version for version in versions if version != NO_VERSION), default=NO_VERSION),
            max_policy_version=max(record.max_policy_version, self.max_policy_version),
            ended=record.kind == "end",
        )


class LogReader:
    """Reads the records of the log in the folder `path`, from `cursor` on (default: the start), as they are committed.

    Opening raises StreamCorrupt if the log does not lead to `cursor`. A snapshot further on shows that a record is
    missing rather than not committed yet: the reader fetches the snapshot when it first finds nothing, and then at most
    once in `snapshot.EVERY` tries.
    """

    def __init__(self, source: Source, path: str, cursor: LogCursor | None = None) -> None:
        self.cursor = cursor or LogCursor()
        self._source = source
        self._path = path
        self._looks_since_snapshot = snapshot.EVERY
        self._known_seq = 0
        """The log is known to have at least this many records."""
        _check_leads_to(source, path, self.cursor)

    @classmethod
    def at_head(cls, source: Source, path: str) -> "LogReader":
        """A reader behind everything committed so far. Raises StreamCorrupt.

        Reads and verifies only the records after the last snapshot; all of them if there is none.
        """
        reader = cls.at_snapshot(source, path)
        reader.to_head()
        return reader

    @classmethod
    def at_snapshot(cls, source: Source, path: str) -> "LogReader":
        """A reader at the log's last valid snapshot; at its start if there is none."""
        reader = cls(source, path)
        reader.cursor = _snapshot_cursor(source, path)
        reader._looks_since_snapshot = 0
        return reader

    def next(self) -> Record | None:
        """The next record, None while there is none; never blocks. Raises StreamCorrupt, and then does not advance."""
        entry = self.peek()
        if entry is None:
            return None
        record, self.cursor = entry
        return record

    def peek(self) -> tuple[Record, LogCursor] | None:
        """Returns the next record and the cursor after it, without advancing. Raises StreamCorrupt."""
        file = f"{self._path}/{layout.record(self.cursor.seq)}"
        self._looks_since_snapshot += 1
        try:
            data = bytes(self._source.get(file))
        except NotInStore:
            if not self._is_passed():
                return None
            data = self._get_missing(file)
        try:
            record = self._verified(data, file)
        except StreamCorrupt:
            # It may have been damaged on the way here.
            data = bytes(self._source.get(file))
            record = self._verified(data, file)
        return record, self.cursor.after(record, _digest(data))

    def _verified(self, data: bytes, file: str) -> Record:
        record = decode(data, file)
        _check_follows(record, self.cursor, file)
        return record

    def to_head(self) -> LogCursor:
        """Pass every record committed so far. Raises StreamCorrupt."""
        while self.next():
            pass
        return self.cursor

    def _is_passed(self) -> bool:
        """Whether a snapshot shows that the log continues after the cursor; it can't show a hole after itself."""
        if self._looks_since_snapshot >= snapshot.EVERY:
            self._looks_since_snapshot = 0
            head = _snapshot_cursor(self._source, self._path, behind=self.cursor.seq)
            self._known_seq = max(self._known_seq, head.seq)
        return self.cursor.seq < self._known_seq

    def _get_missing(self, file: str) -> bytes:
        # It may have been committed after we looked for it and before we read the snapshot.
        for _ in range(_LOOKS_AT_A_HOLE):
            with suppress(NotInStore):
                return bytes(self._source.get(file))
        raise damaged_record(file, f"the record is missing, but the log continues to record {self._known_seq - 1}")


def check_no_hole(store: Store, path: str, head: LogCursor) -> None:
    """Raises StreamCorrupt if there are records soon after `head`, where the log seems to end: one was deleted."""
    for beyond in _LOOKED_AT_BEYOND:
        if store.exists(f"{path}/{layout.record(head.seq + beyond)}"):
            file = f"{path}/{layout.record(head.seq)}"
            # It may have been committed since the caller looked.
            if not store.exists(file):
                raise damaged_record(file, f"the record is missing, but record {head.seq + beyond} is there")


def backwards(source: Source, path: str, cursor: LogCursor) -> Iterator[Record]:
    """The records before `cursor`, newest first, each verified by the sha256 that the one after it holds.

    Raises StreamCorrupt where the log does not lead to `cursor`.
    """
    prev = cursor.prev
    for seq in reversed(range(cursor.seq)):
        file = f"{path}/{layout.record(seq)}"
        record = decode(_get_passed(source, file, prev), file)
        if record.seq != seq:
            raise damaged_record(file, f"the record says it is number {record.seq}, expected {seq}")
        yield record
        prev = record.prev


class LogWriter:
    """The one writer of the log in the folder `path`, from its opening until a newer one opens. Not thread-safe.

    `writer` says who this is, for people. Opening commits a fence, which ends every older writer.
    When the store itself fails (OSError), whether the record was committed is unknown: open a new writer to learn it.
    """

    def __init__(self, store: Store, path: str, writer: str) -> None:
        self._store = store
        self._path = path
        self._writer = writer
        reader = LogReader.at_snapshot(store, path)
        self._snapshot_seq = reader.cursor.seq
        while True:
            self.cursor = reader.to_head()
            # A record that was deleted must not be replaced by a fence.
            check_no_hole(store, path, self.cursor)
            fence, data = self._record("fence", self.cursor.epoch + 1)
            if self._put(fence, data) is None:
                break
        self.epoch = fence.epoch

    def commit(self, kind: Literal["data", "end", "checkpoint"], **fields: Any) -> Record:
        """Commit one record with the `fields` of its kind (see `Record`); it is durable on return.

        Raises Fenced if a newer writer took over, ValueError if the log has ended, and ValueError or TypeError for a
        value that is not plain JSON; then nothing was committed.
        """
        if self.cursor.ended:
            raise ValueError(f"{self._path}: nothing can be committed after the end")
        if kind == "data":
            fields["part"] = self.cursor.part
        record, data = self._record(kind, self.epoch, **fields)
        other = self._put(record, data)
        if other is None:
            return record
        file = f"{self._path}/{layout.record(record.seq)}"
        if other.epoch > self.epoch:
            read = f"{other.writer} took over from {self._writer} (epoch {other.epoch} > {self.epoch})"
            raise Fenced(read, file=file)
        raise StreamCorrupt(file, f"epoch {other.epoch} already committed record {record.seq} here")

    def _record(self, kind: Kind, epoch: int, **fields: Any) -> tuple[Record, bytes]:
        """The record to put at the head, and its bytes."""
        record = Record(
            seq=self.cursor.seq,
            kind=kind,
            epoch=epoch,
            nonce=uuid.uuid4().hex,
            writer=self._writer,
            prev=self.cursor.prev,
            **fields,
        )
        # Return the record as readers will get it; it shares nothing that the caller may change later.
        data = encode(record)
        read_back = decode(data, self._path)
        if read_back != record:
            raise ValueError(f"{self._path}: the record would read back differently: use str as keys, lists, no tuples")
        return read_back, data

    def _put(self, record: Record, data: bytes) -> Record | None:
        """Put `record` at the head and pass it; if another record is there, return that one instead."""
        if self.cursor.seq - self._snapshot_seq >= snapshot.EVERY:
            # Before the commit, so that after a failure here it is certain that nothing was committed.
            snapshot.write_snapshot(self._store, self._path, self.cursor.to_json())
            self._snapshot_seq = self.cursor.seq
        file = f"{self._path}/{layout.record(record.seq)}"
        if not self._store.put_if_absent(file, data):
            try:
                other = decode(bytes(self._store.get(file)), file)
            except NotInStore as error:
                raise StreamCorrupt(
                    file, "the next record belongs here, but this is not a file; remove it and resume the run"
                ) from error
            if other.nonce != record.nonce:
                return other
        self.cursor = self.cursor.after(record, _digest(data))
        return None


def _snapshot_cursor(source: Source, path: str, *, behind: int = 0) -> LogCursor:
    """The cursor of the log's last snapshot, if beyond record `behind` and the log leads to it; else its start."""
    values = snapshot.read_snapshot(source, path)
    try:
        cursor = LogCursor.from_json(values) if values else LogCursor()
        if cursor.seq > behind:
            _check_leads_to(source, path, cursor)
            return cursor
    except ValueError:
        # The hint is wrong, not the log: it may be left over from records that a power cut destroyed.
        pass
    return LogCursor()


def _check_leads_to(source: Source, path: str, cursor: LogCursor) -> None:
    if cursor.seq > 0:
        _get_passed(source, f"{path}/{layout.record(cursor.seq - 1)}", cursor.prev)


def _check_follows(record: Record, cursor: LogCursor, file: str) -> None:
    if record.seq != cursor.seq:
        raise damaged_record(file, f"the record says it is number {record.seq}, expected {cursor.seq}")
    if record.prev != cursor.prev:
        raise StreamCorrupt(
            file,
            f"prev is {record.prev!r}, but the record before has {cursor.prev!r}: one of the two is not of this log; "
            "restore both from a copy of the run",
        )
    if record.kind == "fence":
        if record.epoch != cursor.epoch + 1:
            raise damaged_record(file, f"the fence opens epoch {record.epoch}, expected {cursor.epoch + 1}")
        return
    if record.epoch != cursor.epoch:
        raise damaged_record(file, f"the record is of epoch {record.epoch}, but the last fence opened {cursor.epoch}")
    if cursor.ended:
        raise damaged_record(file, f"the {record.kind} record follows the end of epoch {cursor.epoch}")
    if record.kind == "data" and record.part != cursor.part:
        raise damaged_record(file, f"the record is part {record.part}, expected {cursor.part}")


def _get_passed(source: Source, file: str, digest: str) -> bytes:
    """The bytes of a record that was read before and had the sha256 `digest`; what does not fit is read once more."""
    for _ in range(2):
        try:
            data = bytes(source.get(file))
        except NotInStore as error:
            raise damaged_record(file, "the record is missing, but a cursor has passed it") from error
        if _digest(data) == digest:
            return data
    raise damaged_record(file, "the record is not the one that the cursor has passed")


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()
