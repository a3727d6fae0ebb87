"""A run's files as listed at one moment, and the logs that say which of them are committed.

    entries (listed first) ─► streams, checkpoints, weights ─► their logs (read after) ─► records

In this order, a listed file that no record names was not committed when the listing was made. Orphans are such files
that killed processes left:

    seg/<epoch>-….arrows    a part whose writer died before the commit
    data/<step>-…/NAME      a file of a checkpoint, a weights version or a promoted model that was never committed
    .tmp-…                  a local write that was never renamed to its final name

All other files belong to someone else: they are neither reported nor touched. Only maintenance lists a run; stages
never do.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from configs.stored import AnnotatorPools
from millrace.errors import RunMissing
from millrace.evaluation.results import Result, ResultsReader, best_result
from millrace.runs.record import latest_attempt
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.checkpoints import Checkpoint, checkpoint_of
from storage.errors import StreamCorrupt, damaged_record
from storage.schema import CONSUMED, METRIC, SCORE, TEACHER, TRAINER_LOGPROBS, TRAJECTORY, UNFINISHED
from storage.stores.base import TEMPORARY_PREFIX, Entry, Store
from storage.streams.log import LogCursor, LogReader
from storage.streams.record import Record

Kind = Literal[
    "consumed", "merged_metrics", "metrics", "scores", "teachers", "trainer_logprobs", "trajectories", "unfinished"
]
"""The kinds in the order in which their logs are read: no stream refers to rows of an earlier kind."""
_PLACE = r"(?P<generator>\d+)/(?P<annotator>\d+)-of-(?P<num_annotators>\d+)"
STREAM_KINDS: dict[Kind, tuple[str, pa.Schema]] = {
    "trajectories": (r"streams/trajectories/(?P<generator>\d+)", TRAJECTORY),
    "unfinished": (r"streams/unfinished/(?P<generator>\d+)", UNFINISHED),
    "scores": (rf"streams/(?P<pool>scores/[^/]+)/{_PLACE}", SCORE),
    "teachers": (rf"streams/(?P<pool>teachers/[^/]+)/{_PLACE}", TEACHER),
    "consumed": (layout.CONSUMED, CONSUMED),
    "trainer_logprobs": (layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS),
    "metrics": (r"streams/metrics/[^/]+-\d+", METRIC),
    "merged_metrics": (r"streams/merged_metrics/[^/]+-\d+", METRIC),
}
"""Kind → the pattern of its streams' paths, whose named groups are fields of StoredStream, and their schema; in the
order in which rows flow."""

_PART = re.compile(r"(?P<log>.+)/seg/(?P<epoch>\d+)-[^/]+\.arrows")
_CHECKPOINT_FILE = re.compile(rf"(?P<log>{'|'.join(layout.FILE_LOGS)})/data/[^/]+/.+")


@dataclass(frozen=True, kw_only=True)
class StoredStream:
    """One stream, described by its path."""

    path: str
    """Its folder, relative to the run."""
    kind: Kind
    generator: int = 0
    """trajectories, scores, teachers, unfinished: the generator of the trajectories."""
    pool: str = ""
    """scores, teachers: the name of the annotators' pool, as in `AnnotatorPools`."""
    annotator: int = 0
    num_annotators: int = 1
    """scores, teachers: the stream annotates the trajectory parts k with k mod num_annotators = annotator."""

    @property
    def name(self) -> str:
        """The path below `streams/`."""
        return self.path.removeprefix("streams/")

    @property
    def schema(self) -> pa.Schema:
        """Columns of its parts."""
        return STREAM_KINDS[self.kind][1]


@dataclass(kw_only=True)
class StoredLog:
    """The records of one log, up to the first that is damaged or missing."""

    records: list[Record] = field(default_factory=list)
    cursors: list[LogCursor] = field(default_factory=lambda: [LogCursor()])
    """`cursors[seq]` is the position before record `seq`; the last one is the head."""
    damage: StreamCorrupt | None = None

    @property
    def head(self) -> LogCursor:
        """The position after the last record."""
        return self.cursors[-1]

    @property
    def parts(self) -> list[Record]:
        """The data records, by ordinal."""
        return [record for record in self.records if record.kind == "data"]


class Contents:
    """A run, or its folder `below`, as listed at one moment. Raises RunMissing if the store has no run."""

    def __init__(self, store: Store, below: str = "") -> None:
        if not store.exists(layout.RUN):
            raise RunMissing("no run", file=store.url, expected=layout.RUN)
        self.store = store
        self.entries: dict[str, Entry] = {entry.path: entry for entry in store.entries(below)}
        self.logs: dict[str, StoredLog] = {}
        """The logs read so far, by path."""

    @cached_property
    def streams(self) -> list[StoredStream]:
        """Every stream with a record or a part file, sorted by kind, generator and path.

        Logs read in this order never show an annotation whose trajectory is not committed yet.
        """
        folders = {path.rpartition("/")[0] for path in self.entries}
        paths = {folder[: -len("/log")] for folder in folders if folder.endswith(("/log", "/seg"))}
        streams = [stream for path in paths if (stream := _parse_stream(path)) is not None]
        return sorted(streams, key=lambda stream: (stream.kind, stream.generator, stream.path))

    def of_kind(self, kind: Kind) -> list[StoredStream]:
        """The streams of one kind, by generator."""
        return [stream for stream in self.streams if stream.kind == kind]

    @property
    def annotations(self) -> list[StoredStream]:
        """The streams of scorers and teachers, by generator."""
        return [*self.of_kind("scores"), *self.of_kind("teachers")]

    def below(self, folder: str) -> list[Entry]:
        """The files below a folder, sorted by path."""
        return [entry for path, entry in self.entries.items() if path.startswith(f"{folder}/")]

    def has_files(self, checkpoint: Checkpoint) -> bool:
        """Whether all files of a checkpoint were listed."""
        return all(ref.path in self.entries for ref in checkpoint.files.values())

    def read_log(self, path: str) -> StoredLog:
        """Reads and verifies the log in the folder `path`, once; a record missing before listed ones is damage."""
        if path in self.logs:
            return self.logs[path]
        log = self.logs[path] = StoredLog()
        reader = LogReader(self.store, path)
        try:
            while (record := reader.next()) is not None:
                log.records.append(record)
                log.cursors.append(reader.cursor)
            missing = f"{path}/{layout.record(reader.cursor.seq)}"
            entries = [entry.path for entry in self.below(f"{path}/log") if entry.path >= missing]
            if later := sum(layout.record_seq(entry) is not None for entry in entries):
                raise damaged_record(missing, f"the record is missing, but {later} later ones exist")
        except StreamCorrupt as error:
            log.damage = error
        return log

    def read_sound_log(self, path: str) -> StoredLog:
        """Reads a log as `read_log`, but raises StreamCorrupt for damage."""
        log = self.read_log(path)
        if log.damage is not None:
            raise log.damage
        return log

    def checkpoints(self, root: str = layout.CHECKPOINTS) -> list[Checkpoint]:
        """All checkpoints of the log in the folder `root`, oldest first. Raises StreamCorrupt."""
        records = self.read_sound_log(root).records
        return [checkpoint_of(record, root) for record in records if record.kind == "checkpoint"]


def best_stored(store: Store, checkpoints: Iterable[Checkpoint]) -> Result | None:
    """The best result of these checkpoints and of the base model; None if none was evaluated."""
    stored = {(checkpoint.step, weights_checksum(checkpoint)) for checkpoint in checkpoints}
    results = [
        result
        for result in ResultsReader(store).read()
        if result["policy_version"] == 0 or (result["policy_version"], result.get("weights_checksum")) in stored
    ]
    return best_result(results)


def run_annotators(store: Store) -> AnnotatorPools:
    """The pools by the config of the latest attempt. Raises StreamCorrupt."""
    attempt = latest_attempt(store)
    try:
        return AnnotatorPools.of(attempt.config)
    except (KeyError, TypeError, AttributeError) as error:
        raise StreamCorrupt(attempt.path, f"its config does not name reward and annotators: {error!r}") from error


def find_orphans(contents: Contents) -> list[tuple[Entry, str]]:
    """All orphans with the reason of each, sorted by path, once every log of the run was read.

    A temporary folder is one entry. A recent one may be of a process that still runs. Leaves out files of damaged logs,
    whose unreadable records may name them, and parts of a stream's newest writer, which may be about to commit them.
    """
    named = set(_named_files(contents))
    orphans = [(entry, "an interrupted write") for entry in _unfinished_writes(contents)]
    for entry in contents.entries.values():
        match = _PART.fullmatch(entry.path) or _CHECKPOINT_FILE.fullmatch(entry.path)
        log = contents.logs.get(match["log"]) if match and entry.path not in named else None
        if match and log is not None and log.damage is None:
            epoch = match.groupdict().get("epoch")
            if epoch is None or int(epoch) < log.head.epoch or log.head.ended:
                orphans.append((entry, "never committed"))
    return sorted(orphans, key=lambda orphan: orphan[0].path)


def is_temporary(path: str) -> bool:
    """Whether a path is that of an unfinished write, or inside a temporary folder."""
    return any(part.startswith(TEMPORARY_PREFIX) for part in path.split("/"))


def _named_files(contents: Contents) -> Iterator[str]:
    for path, log in contents.logs.items():
        yield from (f"{path}/{record.file}" for record in log.parts)
        for record in log.records:
            if record.kind == "checkpoint":
                with suppress(StreamCorrupt):
                    yield from (ref.path for ref in checkpoint_of(record, path).files.values())


def _unfinished_writes(contents: Contents) -> Iterator[Entry]:
    """Temporary files and folders, each with its contents. Only a local store can leave them."""
    root = contents.store.local_path("")
    if root is None:
        return
    for path in root.rglob(f"{TEMPORARY_PREFIX}*"):
        relative = path.relative_to(root)
        if not is_temporary(relative.parent.as_posix()):
            stats = [file.stat() for file in (path, *path.rglob("*")) if file.exists()]
            yield Entry(
                path=relative.as_posix(),
                bytes=sum(stat.st_size for stat in stats),
                t_modified=max((stat.st_mtime for stat in stats), default=0.0),
            )


def _parse_stream(path: str) -> StoredStream | None:
    for kind, (pattern, _) in STREAM_KINDS.items():
        if match := re.fullmatch(pattern, path):
            fields: dict[str, Any] = match.groupdict()
            fields |= {name: int(value) for name, value in fields.items() if name != "pool"}
            stream = StoredStream(path=path, kind=kind, **fields)
            return stream if stream.annotator < stream.num_annotators else None
    return None
