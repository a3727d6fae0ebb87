"""Whether everything that was committed is still what was committed.

    listing ─► each log: chain, order, checksums ─► each file that a record names: length, checksum, rows
                  │                                        │
                  ├─► scores fit trajectories part by part └─► damaged: a finding; quarantine moves the file
                  └─► the latest checkpoint: cursors on the chains, account = cursors = what `consumed` tells row by row
    files that no record names ─► notes

Reading changes nothing. A damaged record stays where it is, for everything behind it hangs on it.
"""

import json
from dataclasses import dataclass, field, replace
from typing import Literal

from millrace.care.audit import check_cursors, check_ledger, check_told, cursors_of
from millrace.care.contents import Contents, Shape, StoredFiles, StoredStream, run_shape, stored_files
from millrace.care.quarantine import read_note, set_aside
from millrace.care.strays import strays
from millrace.errors import LedgerMismatch
from storage import layout
from storage.errors import PartCorrupt, PartRemoved, StreamCorrupt
from storage.files import FileRef, get_file
from storage.log import LogCursor
from storage.record import Record
from storage.store import Store
from storage.stream import read_part, read_removed

Level = Literal["damaged", "set aside", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about one file."""

    level: Level
    """damaged: not what was committed; set aside: damaged, and in quarantine already; note: harmless."""
    file: str
    """Relative to the run."""
    reason: str
    record: int | None = None
    """Sequence number of the commit record that names the file, where one does."""
    movable: bool = False
    """A file of rows or of a checkpoint, which readers may do without: quarantine moves it."""


@dataclass(kw_only=True)
class Report:
    """What fsck verified and found."""

    streams: int = 0
    records: int = 0
    parts: int = 0
    removed_parts: int = 0
    """Parts whose rows gc removed: their records were verified."""
    checkpoints: int = 0
    """Checkpoint records whose files were verified; versions of weights in the store, and promoted ones, included."""
    bytes: int = 0
    """Size of every file verified."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """How many findings are damage."""
        return sum(finding.level == "damaged" for finding in self.findings)


def fsck(store: Store, *, quarantine: bool = False) -> Report:
    """Verifies the run at the root of `store`; `quarantine` moves damaged files of rows and of checkpoints aside.

    Raises RunMissing, and SchemaUnknown where a newer Millrace wrote a part: this one can't judge it.
    """
    check = _Check(Contents(store))
    check.run()
    if quarantine:
        for finding in check.report.findings:
            if finding.level == "damaged" and finding.movable:
                set_aside(store, finding.file, reason=finding.reason, record=finding.record)
    return check.report


class _Check:
    """One run of fsck: each method verifies one kind of thing and adds to the report."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.store = contents.store
        self.report = Report()
        self.named: set[str] = set()
        """Files that a record names."""
        self.heads: dict[str, LogCursor] = {}
        """Log → the cursor behind its last sound record."""
        self.spans: dict[str, list[tuple[int, int]]] = {}
        """Stream → (first_row_id, rows) of each part."""
        self.cursors: dict[str, LogCursor] = {}
        """Stream → the cursor that the latest checkpoint has in it."""
        self.true_cursors: dict[str, LogCursor] = {}
        """Stream → what that cursor should be, by the records before it."""

    def run(self) -> None:
        self._json_files()
        self._start_model()
        # Checkpoints before streams, and scores before trajectories: what the former speak of is committed by then.
        checkpoints = {log: self._checkpoints(log) for log in layout.FILE_LOGS}[layout.CHECKPOINTS]
        latest = self._latest(checkpoints)
        self.cursors = {} if latest is None else latest[2]
        for stream in self.contents.streams:
            self._stream(stream)
        self._alignment()
        if latest is not None and all(path in self.heads for path in self.cursors):
            self._audit(*latest)
        for stray in strays(self.contents, self.named, self.heads):
            self._find("note", stray.path, stray.reason)

    def _find(self, level: Level, file: str, reason: str, record: int | None = None, *, movable: bool = False) -> None:
        finding = Finding(level=level, file=file, reason=reason, record=record, movable=movable)
        if movable and (note := read_note(self.contents, file)) is not None:
            finding = replace(finding, level="set aside", reason=note.reason)
        self.report.findings.append(finding)

    def _json_files(self) -> None:
        """Files that are small, written once, and have no checksum: they must at least be JSON objects."""
        for path in (layout.RUN, *(entry.path for entry in self.contents.below(layout.ATTEMPTS))):
            data = bytes(self.store.get(path))
            try:
                values = json.loads(data)
            except ValueError as error:
                self._find("damaged", path, f"not JSON: {error}")
                continue
            if not isinstance(values, dict):
                self._find("damaged", path, "not a JSON object")
            self.report.bytes += len(data)

    def _start_model(self) -> None:
        if layout.START_MANIFEST not in self.contents.entries:
            return
        try:
            files = json.loads(bytes(self.store.get(layout.START_MANIFEST)))["files"]
            refs = [FileRef(**ref) for ref in files.values()]
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            self._find("damaged", layout.START_MANIFEST, f"not a list of the start model's files: {error!r}")
            return
        for ref in refs:
            self._file(ref, None)

    def _file(self, ref: FileRef, record: int | None, *, movable: bool = False) -> None:
        try:
            get_file(self.store, ref, record=record)
        except StreamCorrupt as error:
            self._find("damaged", error.file, error.reason, record, movable=movable)
        else:
            self.report.bytes += ref.bytes

    def _log(self, path: str) -> list[Record]:
        """The sound records of a log."""
        records = []
        head = LogCursor()
        wanted = self.cursors.get(path, LogCursor()).seq
        try:
            for record, head in self.contents.log(path):
                records.append(record)
                if head.seq == wanted:
                    self.true_cursors[path] = head
                entry = self.contents.entries.get(f"{path}/{layout.record(record.seq)}")
                self.report.bytes += entry.bytes if entry is not None else 0
            self.heads[path] = head
        except StreamCorrupt as error:
            behind = len([e for e in self.contents.below(f"{path}/log") if e.path > error.file])
            self._find(
                "damaged",
                error.file,
                f"{error.reason}; the {behind} records behind it could not be verified: "
                "restore this file from a copy of the run, and check again",
            )
        self.report.records += len(records)
        return records

    def _checkpoints(self, root: str) -> list[StoredFiles]:
        if not self.contents.below(root):
            return []
        removed = self._removed(root)
        found: list[StoredFiles] = []
        verified: set[str] = set()
        for record in self._log(root):
            if record.kind != "checkpoint":
                continue
            try:
                stored = stored_files(record, len(found), root)
            except StreamCorrupt as error:
                self._find("damaged", error.file, error.reason)
                continue
            found.append(stored)
            self.named.update(ref.path for ref in stored.files.values())
            for ref in stored.files.values():
                gone = stored.ordinal < removed and not self.store.exists(ref.path)
                if ref.path not in verified and not gone:
                    verified.add(ref.path)
                    # A promoted model has no other to fall back on.
                    self._file(ref, record.seq, movable=root != layout.PROMOTED)
            self.report.checkpoints += stored.ordinal >= removed
        return found

    def _stream(self, stream: StoredStream) -> None:
        removed = self._removed(stream.path)
        self.report.streams += 1
        self.spans[stream.path] = []
        for record in self._log(stream.path):
            if record.kind != "data":
                continue
            self.spans[stream.path].append((record.first_row_id, record.rows))
            self.named.add(f"{stream.path}/{record.seg}")
            if record.part < removed:
                self.report.removed_parts += 1
            else:
                self._part(stream, record)

    def _removed(self, log: str) -> int:
        try:
            return read_removed(self.store, log)
        except StreamCorrupt as error:
            self._find("damaged", error.file, error.reason)
            return 0

    def _part(self, stream: StoredStream, record: Record) -> None:
        try:
            table = read_part(self.store, stream.path, stream.schema, record)
        except PartRemoved:
            self.report.removed_parts += 1
            return
        except PartCorrupt as error:
            self._find("damaged", error.file, error.reason, record.seq, movable=True)
            return
        except StreamCorrupt:
            # Whether it was removed can't be told: `_removed` has said so.
            return
        self.report.parts += 1
        self.report.bytes += record.bytes
        if "row_id" in table.column_names and (first := table["row_id"][0].as_py()) != record.first_row_id:
            reason = f"the first row_id is {first}, but the record says {record.first_row_id}"
            self._find("damaged", f"{stream.path}/{record.seg}", reason, record.seq, movable=True)

    def _alignment(self) -> None:
        """Row ids are consecutive in each verified part, so equal first ids and counts make equal rows."""
        for stream in self.contents.streams:
            if stream.kind != "scores" or stream.generator is None:
                continue
            scored = self.spans.get(layout.trajectories(stream.generator))
            if scored is None:
                self._find("note", stream.path, "its trajectories are not in this run: not compared with them")
                continue
            for part, span in enumerate(self.spans[stream.path]):
                self._aligned(stream, part, span, scored)

    def _aligned(self, stream: StoredStream, part: int, span: tuple[int, int], scored: list[tuple[int, int]]) -> None:
        number = stream.trajectory_part(part)
        expected = scored[number] if number < len(scored) else None
        if span == expected:
            return
        wanted = "does not exist" if expected is None else f"has {expected[1]} rows from {expected[0]} on"
        self._find(
            "damaged",
            stream.path,
            f"part {part} holds the scores of {span[1]} rows from {span[0]} on, but part {number} of "
            f"{layout.trajectories(stream.generator or 0)} {wanted}",
        )

    def _latest(self, checkpoints: list[StoredFiles]) -> tuple[StoredFiles, Shape, dict[str, LogCursor]] | None:
        """The latest checkpoint with its cursors; None where there is none that could be compared with the streams."""
        # What a replay takes from, and how far, is another run's.
        if not checkpoints or layout.REPLAY in self.contents.entries:
            return None
        checkpoint = checkpoints[-1]
        try:
            shape = run_shape(self.store)
        except StreamCorrupt as error:
            self._find("note", error.file, f"{error.reason}; so the ledger could not be checked")
            return None
        try:
            return checkpoint, shape, cursors_of(checkpoint.record.body["state"], shape)
        except (ValueError, KeyError, TypeError) as error:
            self._find("damaged", _file(checkpoint), f"its cursors can't be read: {error!r}")
            return None

    def _audit(self, checkpoint: StoredFiles, shape: Shape, cursors: dict[str, LogCursor]) -> None:
        state = checkpoint.record.body["state"]
        try:
            check_cursors(cursors, self.true_cursors)
            check_ledger(state, shape, self.heads)
            if layout.CONSUMED in self.heads:
                check_told(self.store, checkpoint.step, state)
        except (LedgerMismatch, ValueError, KeyError, TypeError) as error:
            self._find("damaged", _file(checkpoint), f"the books of this checkpoint are wrong: {error}")


def _file(checkpoint: StoredFiles) -> str:
    """The record that commits a checkpoint."""
    return f"{layout.CHECKPOINTS}/{layout.record(checkpoint.record.seq)}"
