"""Verifies that everything committed is still intact.

    listing ─┬─► results of evaluations, their answers, blocks of prompts: can be read?
             └─► each log: chain, order, checksums ─► each file that a record names: length, checksum, rows
                  │                                        │
                  ├─► scores match trajectories part by part └─► damaged: a finding; quarantine moves the file
                  └─► the latest checkpoint: its cursors match the streams, and its account matches `consumed`
    files that no record names ─► notes

Reading changes nothing. A damaged record is never moved, because everything after it depends on it. A damaged file is
moved to `quarantine/`, together with a note; readers then see it as missing and continue.
"""

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from millrace.errors import InputError, LedgerMismatch
from millrace.evaluation.answers import read_answers
from millrace.evaluation.results import ResultsReader, parse_result
from millrace.maintenance.contents import Contents, StoredLog, StoredStream, find_orphans
from millrace.maintenance.cross_checks import check_ledger, contradictions, misaligned_annotations
from millrace.models.start_folder import parse_manifest
from millrace.prompts.blocks import parse_block
from millrace.runs.decisions import parse_decision
from millrace.runs.record import AttemptEnd, check_run_id, parse_attempt
from storage import layout
from storage.checkpoints import Checkpoint, checkpoint_of
from storage.errors import NotInStore, PartCorrupt, PartRemoved, StreamCorrupt
from storage.json_text import parse_as
from storage.stores.base import Store
from storage.streams.files import FileRef, get_file
from storage.streams.record import Record
from storage.streams.stream import read_part, read_removed

Level = Literal["damaged", "set aside", "note"]


@dataclass(frozen=True, kw_only=True)
class Finding:
    """An observation about one file."""

    level: Level
    """damaged: differs from the commit; set aside: damaged, and in quarantine; note: harmless."""
    file: str
    reason: str
    record: int | None = None
    """Sequence number of the commit record that names the file, if one does."""
    movable: bool = False
    """Whether quarantine moves it: a file of rows, of a checkpoint or of an evaluation, which may be missing."""


@dataclass(kw_only=True)
class Report:
    """The amount verified, and the findings."""

    streams: int = 0
    records: int = 0
    parts: int = 0
    removed_parts: int = 0
    """Parts whose rows gc removed. Their records were verified."""
    checkpoints: int = 0
    """Checkpoint records whose files were verified, including weights in the store and promoted models."""
    findings: list[Finding] = field(default_factory=list)

    @property
    def damaged(self) -> int:
        """Number of damaged files."""
        return sum(finding.level == "damaged" for finding in self.findings)


def fsck(store: Store, *, quarantine: bool = False) -> Report:
    """Verifies the run at the root of `store`. `quarantine` moves damaged files of rows and of checkpoints aside.

    Raises RunMissing, SchemaUnknown if a newer Millrace wrote a part, and InputError if a file can't be moved.
    """
    report = _Check(Contents(store)).run()
    for finding in report.findings if quarantine else []:
        if finding.level == "damaged" and finding.movable:
            _set_aside(store, finding)
    return report


def _set_aside(store: Store, finding: Finding) -> None:
    """Moves a damaged file, or writes only the note if the file is missing. After a crash midway, may be repeated."""
    target = f"{layout.QUARANTINE}/{finding.file}"
    with suppress(NotInStore):
        data = store.get(finding.file)
        store.put_if_absent(target, data)
        if store.get(target) != data:
            raise InputError(
                f"differs from {finding.file}", file=f"{store.url}/{target}", expected="no other file of this name here"
            )
    note = {"file": finding.file, "reason": finding.reason, "record": finding.record, "t": time.time()}
    store.put(f"{target}.json", json.dumps(note, indent=1, sort_keys=True).encode())
    store.delete(finding.file)


def _check_run_record(data: bytes, path: str) -> None:
    """Checks `run.json` or a file in `attempts/`. Raises StreamCorrupt."""
    values = parse_as(dict[str, Any], data, path)
    if path == layout.RUN:
        check_run_id(values)
    if path.endswith(".json"):
        parse_attempt(values, path)
    elif path.endswith(".ended"):
        parse_as(AttemptEnd, data, path)


_Parse = Callable[[bytes, str], object]
_SMALL_FILES: list[tuple[str, _Parse, Callable[[int], str] | None]] = [
    (layout.ATTEMPTS, _check_run_record, None),
    (layout.EVALUATIONS, parse_result, None),
    (layout.PROMPT_BLOCKS, parse_block, layout.prompt_block),
    (layout.DECISIONS, parse_decision, layout.decision),
]
"""Folder, how to read its files, and the names of files that are numbered from 0 without gaps."""


class _Check:
    """One run of fsck: each method verifies one kind of file and adds to the report."""

    def __init__(self, contents: Contents) -> None:
        self.contents = contents
        self.store = contents.store
        self.report = Report()

    def run(self) -> Report:
        self._small_files()
        # Checkpoints before streams, and scores before trajectories: everything they refer to is committed by then.
        checkpoints = {log: self._checkpoints(log) for log in layout.FILE_LOGS}[layout.CHECKPOINTS]
        for stream in self.contents.streams:
            self._stream(stream)
        for stream in self.contents.annotations:
            self._alignment(stream)
        if checkpoints:
            self._ledger(*checkpoints[-1])
        for entry, reason in find_orphans(self.contents):
            self._find("note", entry.path, reason)
        return self.report

    def _find(self, level: Level, file: str, reason: str, record: int | None = None, *, movable: bool = False) -> None:
        note = f"{layout.QUARANTINE}/{file}.json"
        if movable and note in self.contents.entries and file not in self.contents.entries:
            level, reason = "set aside", json.loads(bytes(self.store.get(note)))["reason"]
        self.report.findings.append(Finding(level=level, file=file, reason=reason, record=record, movable=movable))

    @contextmanager
    def _finding(self, *, movable: bool = False) -> Iterator[None]:
        """Turns damage into a finding."""
        try:
            yield
        except StreamCorrupt as error:
            self._find("damaged", error.file, error.reason, error.record, movable=movable)

    def _small_files(self) -> None:
        """Verifies the files that no record names. A version whose evaluation is missing is evaluated again."""
        self._small_file(layout.RUN, _check_run_record)
        for folder, parse, path_of in _SMALL_FILES:
            for number, entry in enumerate(self.contents.below(folder)):
                if path_of is not None and entry.path != (expected := path_of(number)):
                    self._find("damaged", expected, f"missing, though {entry.path} is there")
                    break
                self._small_file(entry.path, parse, movable=folder == layout.EVALUATIONS)
        for result in ResultsReader(self.store).read():
            with self._finding(movable=True):
                read_answers(self.store, result)
        if layout.START_MANIFEST in self.contents.entries:
            with self._finding():
                for ref in parse_manifest(bytes(self.store.get(layout.START_MANIFEST))).values():
                    self._file(ref)

    def _small_file(self, path: str, parse: _Parse, *, movable: bool = False) -> None:
        try:
            data = bytes(self.store.get(path))
        except NotInStore:
            self._find("damaged", path, "not a file")
            return
        with self._finding(movable=movable):
            parse(data, path)

    def _file(self, ref: FileRef, record: int | None = None, *, movable: bool = False) -> None:
        with self._finding(movable=movable):
            get_file(self.store, ref, record=record)

    def _log(self, path: str) -> tuple[StoredLog, int]:
        """Verifies a log; returns it with the number of parts whose rows gc removed."""
        log = self.contents.read_log(path)
        self.report.records += len(log.records)
        if log.damage is not None:
            after = sum(entry.path > log.damage.file for entry in self.contents.below(f"{path}/log"))
            reason = f"{log.damage.reason}, then check again: the {after} records after it could not be verified"
            self._find("damaged", log.damage.file, reason)
        removed = 0
        with self._finding():
            removed = read_removed(self.store, path)
        return log, removed

    def _checkpoints(self, root: str) -> list[tuple[str, Checkpoint]]:
        """Verifies a log of files; returns its checkpoints, each with the path of its record."""
        log, removed = self._log(root)
        checkpoints: list[tuple[str, Checkpoint]] = []
        verified: set[str] = set()
        for record in log.records:
            if record.kind != "checkpoint":
                continue
            with self._finding():
                checkpoint = checkpoint_of(record, root)
                is_removed = len(checkpoints) < removed
                checkpoints.append((f"{root}/{layout.record(record.seq)}", checkpoint))
                self.report.checkpoints += not is_removed
                for ref in checkpoint.files.values():
                    if ref.path not in verified and not (is_removed and not self.store.exists(ref.path)):
                        verified.add(ref.path)
                        # A promoted model is not movable: nothing could replace it.
                        self._file(ref, record.seq, movable=root != layout.PROMOTED)
        return checkpoints

    def _stream(self, stream: StoredStream) -> None:
        log, removed = self._log(stream.path)
        self.report.streams += 1
        for record in log.parts:
            if record.part < removed:
                self.report.removed_parts += 1
            else:
                self._part(stream, record)

    def _part(self, stream: StoredStream, record: Record) -> None:
        try:
            table = read_part(self.store, stream.path, stream.schema, record)
        except PartRemoved:
            self.report.removed_parts += 1
        except PartCorrupt as error:
            self._find("damaged", error.file, error.reason, record.seq, movable=True)
        except StreamCorrupt:
            # Damage to removed.json, which `_log` has reported: it is unknown whether the part was removed.
            pass
        else:
            self.report.parts += 1
            for reason in contradictions(record, table):
                self._find("damaged", f"{stream.path}/{record.file}", reason, record.seq, movable=True)

    def _alignment(self, stream: StoredStream) -> None:
        logs, trajectories = self.contents.logs, layout.trajectories(stream.generator)
        if trajectories not in logs:
            self._find("note", stream.path, "not compared with its trajectories: they are not in this run")
            return
        for reason in misaligned_annotations(stream, logs[stream.path].parts, logs[trajectories].parts):
            self._find("damaged", stream.path, reason)

    def _ledger(self, file: str, checkpoint: Checkpoint) -> None:
        """Compares the latest checkpoint, which `file` commits, with the streams."""
        # The cursors of a replay are those of another run.
        if layout.REPLAY in self.contents.entries:
            return
        try:
            check_ledger(self.contents, checkpoint)
        except StreamCorrupt as error:
            self._find("note", error.file, f"{error.reason}; so the ledger could not be checked")
        except LedgerMismatch as error:
            self._find("damaged", file, f"this checkpoint does not match the streams: {error}")
        except (ValueError, KeyError, TypeError) as error:
            self._find("damaged", file, f"its cursors or its account can't be read: {error!r}")
