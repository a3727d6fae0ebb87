"""Verifies that everything committed is still what was committed.

    listing ─┬─► results of evaluations, blocks of the curriculum: can be read?
             └─► each log: chain, order, checksums ─► each file that a record names: length, checksum, rows
                  │                                        │
                  ├─► scores match trajectories part by part └─► damaged: a finding; quarantine moves the file
                  └─► the latest checkpoint: its cursors match the streams, and its account matches `consumed`
    files that no record names ─► notes

Reading changes nothing. A damaged record is never moved, because everything behind it depends on it.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa
import pyarrow.compute as pc

from millrace.errors import LedgerMismatch
from millrace.evaluation.results import parse_result
from millrace.maintenance.checkpoint_audit import CheckpointAudit
from millrace.maintenance.listing import Contents, StoredStream, run_scoring
from millrace.maintenance.orphans import orphans
from millrace.maintenance.quarantine import reason_set_aside, set_aside
from millrace.models.start_folder import parse_manifest
from millrace.prompts.curriculum import parse_block
from millrace.runs.decisions import parse_decision
from millrace.runs.record import check_run_id, parse_attempt, parse_end
from storage import layout
from storage.checkpoints import Checkpoint, checkpoint_of
from storage.errors import NotInStore, PartCorrupt, PartRemoved, StreamCorrupt
from storage.json_text import parse_json
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import read_part, read_removed

Level = Literal["damaged", "set aside", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something about one file."""

    level: Level
    """damaged: not what was committed; set aside: damaged, and already in quarantine; note: harmless."""
    file: str
    """Relative to the run."""
    reason: str
    record: int | None = None
    """Sequence number of the commit record that names the file, if one does."""
    movable: bool = False
    """Whether quarantine moves it: a file of rows or of a checkpoint, which readers can do without."""


@dataclass(kw_only=True)
class Report:
    """What fsck verified and found."""

    streams: int = 0
    records: int = 0
    parts: int = 0
    removed_parts: int = 0
    """Parts whose rows gc removed. Their records were verified."""
    checkpoints: int = 0
    """Checkpoint records whose files were verified, including weights in the store and promoted models."""
    bytes: int = 0
    """Size of all files verified."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """How many findings are damage."""
        return sum(finding.level == "damaged" for finding in self.findings)


def fsck(store: Store, *, quarantine: bool = False) -> Report:
    """Verifies the run at the root of `store`. `quarantine` moves damaged files of rows and of checkpoints aside.

    Raises RunMissing, and SchemaUnknown if a newer Millrace wrote a part: this version can't verify it.
    """
    report = _Check(Contents(store)).run()
    if quarantine:
        for finding in report.findings:
            if finding.level == "damaged" and finding.movable:
                set_aside(store, finding.file, reason=finding.reason, record=finding.record)
    return report


class _Check:
    """One run of fsck: each method verifies one kind of thing and adds to the report."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.store = contents.store
        self.report = Report()
        self.named: set[str] = set()
        """Files that a record names."""
        self.heads: dict[str, LogCursor] = {}
        """Log → the cursor behind its last record; only of sound logs."""
        self.spans: dict[str, list[tuple[int, int]]] = {}
        """Stream → (first_row_id, rows) of each part."""
        self.cursors: dict[str, LogCursor] = {}
        """Stream → the latest checkpoint's cursor in it."""
        self.true_cursors: dict[str, LogCursor] = {}
        """Stream → what that cursor should be, from the records before it."""

    def run(self) -> Report:
        self._small_files()
        self._start_model()
        # Checkpoints before streams, and scores before trajectories: what they refer to is committed by then.
        checkpoints = {log: self._checkpoints(log) for log in layout.FILE_LOGS}[layout.CHECKPOINTS]
        audit = self._audit(*checkpoints[-1]) if checkpoints else None
        self.cursors = {} if audit is None else audit.cursors
        for stream in self.contents.streams:
            self._stream(stream)
        for stream in self.contents.of_kind("scores"):
            self._alignment(stream)
        if audit is not None and self.cursors.keys() <= self.heads.keys():
            try:
                audit.check(self.store, self.true_cursors, self.heads)
            except (LedgerMismatch, ValueError, KeyError, TypeError) as error:
                self._find("damaged", checkpoints[-1][0], f"this checkpoint does not match the streams: {error}")
        for orphan in orphans(self.contents, self.named, self.heads):
            self._find("note", orphan.path, orphan.reason)
        return self.report

    def _find(self, level: Level, file: str, reason: str, record: int | None = None, *, movable: bool = False) -> None:
        finding = Finding(level=level, file=file, reason=reason, record=record, movable=movable)
        if movable and (known := reason_set_aside(self.contents, file)) is not None:
            finding = replace(finding, level="set aside", reason=known)
        self.report.findings.append(finding)

    def _small_files(self) -> None:
        """Verifies the files that no record names. Only `curriculum` and `decisions` have checksums."""
        for path in (layout.RUN, *(entry.path for entry in self.contents.below(layout.ATTEMPTS))):
            self._small_file(path, _check_record)
        for entry in self.contents.below(layout.EVALUATIONS):
            # A run can do without a result: its version is evaluated again.
            self._small_file(entry.path, parse_result, movable=True)
        self._numbered(layout.CURRICULUM, layout.curriculum_block, parse_block)
        self._numbered(layout.DECISIONS, layout.decision, parse_decision)

    def _numbered(self, folder: str, path_of: Callable[[int], str], parse: Callable[[bytes, str], object]) -> None:
        """Verifies the files of a folder, which are numbered from 0 without gaps."""
        for number, entry in enumerate(self.contents.below(folder)):
            if entry.path != (expected := path_of(number)):
                self._find("damaged", expected, f"missing, though {entry.path} is there")
                return
            self._small_file(entry.path, parse)

    def _small_file(self, path: str, parse: Callable[[bytes, str], object], *, movable: bool = False) -> None:
        try:
            data = bytes(self.store.get(path))
            parse(data, path)
        except NotInStore:
            self._find("damaged", path, "not a file")
        except StreamCorrupt as error:
            self._find("damaged", error.file, error.reason, movable=movable)
        else:
            self.report.bytes += len(data)

    def _start_model(self) -> None:
        if layout.START_MANIFEST not in self.contents.entries:
            return
        try:
            refs = parse_manifest(bytes(self.store.get(layout.START_MANIFEST)))
        except StreamCorrupt as error:
            self._find("damaged", error.file, error.reason)
            return
        for ref in refs.values():
            self._file(ref)

    def _file(self, ref: FileRef, record: int | None = None, *, movable: bool = False) -> None:
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
        wanted = self.cursors.get(path, head).seq
        try:
            for record, head in self.contents.log(path):
                records.append(record)
                if head.seq == wanted:
                    self.true_cursors[path] = head
                entry = self.contents.entries.get(f"{path}/{layout.record(record.seq)}")
                self.report.bytes += entry.bytes if entry is not None else 0
            self.heads[path] = head
        except StreamCorrupt as error:
            behind = sum(entry.path > error.file for entry in self.contents.below(f"{path}/log"))
            reason = f"{error.reason}, then check again: the {behind} records behind it could not be verified"
            self._find("damaged", error.file, reason)
        self.report.records += len(records)
        return records

    def _checkpoints(self, root: str) -> list[tuple[str, Checkpoint]]:
        """The checkpoints of a log, each with the path of its record."""
        if not self.contents.below(root):
            return []
        removed = self._removed(root)
        checkpoints: list[tuple[str, Checkpoint]] = []
        verified: set[str] = set()
        for record in self._log(root):
            if record.kind != "checkpoint":
                continue
            try:
                checkpoint = checkpoint_of(record, root)
            except StreamCorrupt as error:
                self._find("damaged", error.file, error.reason)
                continue
            is_removed = len(checkpoints) < removed
            checkpoints.append((f"{root}/{layout.record(record.seq)}", checkpoint))
            for ref in checkpoint.files.values():
                self.named.add(ref.path)
                if ref.path not in verified and not (is_removed and not self.store.exists(ref.path)):
                    verified.add(ref.path)
                    # A promoted model is not movable: nothing could replace it.
                    self._file(ref, record.seq, movable=root != layout.PROMOTED)
            self.report.checkpoints += not is_removed
        return checkpoints

    def _stream(self, stream: StoredStream) -> None:
        removed = self._removed(stream.path)
        self.report.streams += 1
        self.spans[stream.path] = []
        for record in self._log(stream.path):
            if record.kind != "data":
                continue
            self.spans[stream.path].append((record.first_row_id, record.rows))
            self.named.add(f"{stream.path}/{record.file}")
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
            # removed.json is damaged, so it is unknown whether the part was removed. `_removed` has reported that.
            return
        self.report.parts += 1
        self.report.bytes += record.bytes
        for reason in _disagreements(record, table):
            self._find("damaged", f"{stream.path}/{record.file}", reason, record.seq, movable=True)

    def _alignment(self, stream: StoredStream) -> None:
        """Row ids are consecutive in each verified part, so equal first ids and counts mean equal rows."""
        trajectories = layout.trajectories(stream.generator)
        scored = self.spans.get(trajectories)
        if scored is None:
            self._find("note", stream.path, "not compared with its trajectories: they are not in this run")
            return
        for part, span in enumerate(self.spans[stream.path]):
            number = stream.trajectory_part(part)
            expected = scored[number] if number < len(scored) else None
            if span != expected:
                has = "does not exist" if expected is None else f"has {expected[1]} rows from {expected[0]} on"
                held = f"part {part} holds the scores of {span[1]} rows from {span[0]} on"
                self._find("damaged", stream.path, f"{held}, but part {number} of {trajectories} {has}")

    def _audit(self, file: str, checkpoint: Checkpoint) -> CheckpointAudit | None:
        """The audit of the checkpoint that `file` commits; None if it can't be compared with the streams."""
        # The cursors of a replay are those of another run.
        if layout.REPLAY in self.contents.entries:
            return None
        try:
            reward, _ = run_scoring(self.store)
        except StreamCorrupt as error:
            self._find("note", error.file, f"{error.reason}; so the ledger could not be checked")
            return None
        try:
            return CheckpointAudit(checkpoint, reward)
        except (ValueError, KeyError, TypeError) as error:
            self._find("damaged", file, f"its cursors can't be read: {error!r}")
            return None


def _check_record(data: bytes, path: str) -> None:
    """Checks `run.json` or a file in `attempts/`. Raises StreamCorrupt unless it holds what it should."""
    try:
        values = parse_json(data)
    except ValueError as error:
        raise StreamCorrupt(path, f"not JSON: {error}") from error
    if not isinstance(values, dict):
        raise StreamCorrupt(path, "not a JSON object")
    if path == layout.RUN:
        check_run_id(values)
    if path.endswith(".json"):
        parse_attempt(values, path)
    elif path.endswith(".ended"):
        parse_end(data, path)


def _disagreements(record: Record, rows: pa.Table) -> Iterator[str]:
    """One clause for each value of a part's record that its rows give otherwise."""
    values: dict[str, object] = {}
    has_ids = "row_id" in rows.column_names
    if has_ids:
        values["first_row_id"] = rows["row_id"][0].as_py()
    if "response_tokens" in rows.column_names:
        values["tokens"] = pc.sum(pc.list_value_length(rows["response_tokens"])).as_py()
        values["min_policy_version"] = pc.min(rows["min_policy_version"]).as_py()
        # Records of unfinished responses, whose rows have no row_id, name no groups.
        if has_ids:
            values["group_ids"] = rows["group_id"].unique().to_pylist()
    for name, value in values.items():
        if (recorded := getattr(record, name)) != value:
            yield f"{name} of the rows is {value}, but the record says {recorded}"
