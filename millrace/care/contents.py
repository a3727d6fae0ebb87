"""What lies in a run's folder: one listing, and the logs that say which of the files listed mean something.

    entries (listed first) ─► streams, checkpoints, weights ─► their logs (read after) ─► records

In this order a file that is listed and that no record names was not committed when the listing was made.
Listings are for housekeeping only: no stage uses one.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import pyarrow as pa

from millrace.errors import RunMissing
from millrace.run import latest_attempt, read_run
from storage import layout
from storage.errors import StreamCorrupt
from storage.files import FileRef
from storage.log import LogCursor, LogReader
from storage.record import Record
from storage.schema import CONSUMED, METRIC, SCORE, TRAINER_LOGPROBS, TRAJECTORY
from storage.store import Entry, Store

_TRAJECTORIES = re.compile(r"streams/trajectories/(?P<generator>\d+)")
_SCORES = re.compile(r"streams/scores/(?P<reward>[^/]+)/(?P<generator>\d+)/(?P<scorer>\d+)-of-(?P<num_scorers>\d+)")
_METRICS = re.compile(r"streams/metrics/[^/]+-\d+")
_IN_A_STREAM = re.compile(r"(streams/.+)/(?:log|seg)/[^/]+")
_RECORD = re.compile(r"\d{12}\.json")

Kind = Literal["consumed", "metrics", "scores", "trainer_logprobs", "trajectories"]
"""In the order in which their logs are to be read: none speaks of rows of one before it."""
_SCHEMAS: dict[Kind, pa.Schema] = {
    "consumed": CONSUMED,
    "metrics": METRIC,
    "scores": SCORE,
    "trainer_logprobs": TRAINER_LOGPROBS,
    "trajectories": TRAJECTORY,
}
_SINGLE: dict[str, Kind] = {layout.CONSUMED: "consumed", layout.TRAINER_LOGPROBS: "trainer_logprobs"}


@dataclass(frozen=True, kw_only=True)
class StoredStream:
    """One stream of a run, by what its path says."""

    path: str
    """Its folder, relative to the run."""
    kind: Kind
    generator: int | None = None
    """trajectories, scores: which generator made the trajectories."""
    reward: str | None = None
    """scores: the reward's name."""
    scorer: int = 0
    """scores: which of the scorers writes it."""
    num_scorers: int = 1
    """scores: it holds the scores of the trajectory parts k with k mod num_scorers = scorer."""

    @property
    def name(self) -> str:
        """Its path below `streams/`."""
        return self.path.removeprefix("streams/")

    @property
    def schema(self) -> pa.Schema:
        """Columns of its parts."""
        return _SCHEMAS[self.kind]

    def trajectory_part(self, part: int) -> int:
        """scores: the trajectory part that its part number `part` scores."""
        return part * self.num_scorers + self.scorer


@dataclass(frozen=True, kw_only=True)
class StoredFiles:
    """What one checkpoint record commits: of a checkpoint, or of weights on their way."""

    ordinal: int
    """Place among the checkpoint records of its log, from 0."""
    record: Record
    step: int
    """Optimizer steps behind it: the policy version."""
    files: dict[str, FileRef]
    """By name."""

    @property
    def bytes(self) -> int:
        """Size of all its files."""
        return sum(ref.bytes for ref in self.files.values())


@dataclass(frozen=True, kw_only=True)
class Shape:
    """How many generators and scorers a run has, and what scores its trajectories."""

    reward: str
    num_generators: int
    num_scorers: int

    def trajectories(self) -> list[str]:
        """The paths of all trajectory streams that the trainer takes from."""
        return [layout.trajectories(g) for g in range(self.num_generators)]

    def scores(self) -> list[str]:
        """The paths of all score streams that the trainer takes from."""
        return [
            layout.scores(self.reward, g, s, self.num_scorers)
            for g in range(self.num_generators)
            for s in range(self.num_scorers)
        ]


class Contents:
    """A run as listed at one moment. Raises RunMissing where there is no run."""

    def __init__(self, store: Store) -> None:
        if not store.exists(layout.RUN):
            raise RunMissing(f"no run at {store.url}: expected {layout.RUN} there")
        self.store = store
        self.entries: dict[str, Entry] = {entry.path: entry for entry in store.entries()}

    @cached_property
    def streams(self) -> list[StoredStream]:
        """Every stream that holds a record or a segment, by kind in the order of their names.

        Logs read in this order never show a score whose trajectory was not committed yet.
        """
        paths = {found[1] for path in self.entries if (found := _IN_A_STREAM.fullmatch(path))}
        streams = [stream for path in paths if (stream := _stream(path)) is not None]
        return sorted(streams, key=lambda stream: (stream.kind, stream.generator or 0, stream.path))

    def trajectories(self) -> list[StoredStream]:
        """The streams of trajectories, by generator."""
        return [stream for stream in self.streams if stream.kind == "trajectories"]

    def scores_of(self, generator: int) -> dict[tuple[str, int], list[StoredStream | None]]:
        """(reward, S) → the S score streams of that generator's trajectories, by scorer; None where one is missing."""
        sets: dict[tuple[str, int], list[StoredStream | None]] = {}
        for stream in self.streams:
            if stream.kind == "scores" and stream.generator == generator:
                key = (stream.reward or "", stream.num_scorers)
                sets.setdefault(key, [None] * stream.num_scorers)[stream.scorer] = stream
        return sets

    def below(self, folder: str) -> list[Entry]:
        """The files listed below a folder, sorted by path."""
        return [entry for path, entry in self.entries.items() if path.startswith(f"{folder}/")]

    def log(self, path: str) -> Iterator[tuple[Record, LogCursor]]:
        """The records of the log in the folder `path`, each with the cursor behind it.

        Raises StreamCorrupt for a damaged record, and for one that is missing although later ones are listed.
        """
        reader = LogReader(self.store, path)
        while (record := reader.next()) is not None:
            yield record, reader.cursor
        missing = f"{path}/{layout.record(reader.cursor.seq)}"
        later = [entry.path for entry in self.below(f"{path}/log") if is_record(entry.path) and entry.path >= missing]
        if later:
            raise StreamCorrupt(missing, f"the record is missing, but {len(later)} later ones are there")

    def checkpoints(self, root: str = layout.CHECKPOINTS) -> list[StoredFiles]:
        """All checkpoint records of the log in the folder `root`, oldest first. Raises StreamCorrupt."""
        records = [record for record, _ in self.log(root) if record.kind == "checkpoint"]
        return [stored_files(record, ordinal, root) for ordinal, record in enumerate(records)]


def stored_files(record: Record, ordinal: int, root: str) -> StoredFiles:
    """What a checkpoint record commits. Raises StreamCorrupt, which names it, where its body is of another kind."""
    try:
        files = {name: FileRef(**ref) for name, ref in record.body["files"].items()}
        return StoredFiles(ordinal=ordinal, record=record, step=record.body["step"], files=files)
    except (KeyError, TypeError, AttributeError) as error:
        file = f"{root}/{layout.record(record.seq)}"
        raise StreamCorrupt(file, f"not a checkpoint's record: {error!r}") from error


def run_id(store: Store) -> str:
    """The run's name. Raises StreamCorrupt where `run.json`, which is there, does not tell it."""
    with _told_by(layout.RUN):
        return str(read_run(store)["run_id"])


def run_shape(store: Store) -> Shape:
    """By the config of the run's latest start. Raises StreamCorrupt where that is there, and no config."""
    with _told_by(layout.RUN):
        config = latest_attempt(store).config
        return Shape(
            reward=config["scoring"]["reward"],
            num_generators=config["generation"]["replicas"],
            num_scorers=config["scoring"]["replicas"],
        )


@contextmanager
def _told_by(file: str) -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        raise StreamCorrupt(file, f"it, or a later start of the run, does not say what it should: {error!r}") from error


def is_record(path: str) -> bool:
    """Whether a path is that of a commit record."""
    folder, _, name = path.rpartition("/")
    return folder.endswith("/log") and _RECORD.fullmatch(name) is not None


def _stream(path: str) -> StoredStream | None:
    if found := _TRAJECTORIES.fullmatch(path):
        return StoredStream(path=path, kind="trajectories", generator=int(found["generator"]))
    if found := _SCORES.fullmatch(path):
        scorer, num_scorers = int(found["scorer"]), int(found["num_scorers"])
        if scorer < num_scorers:
            return StoredStream(
                path=path,
                kind="scores",
                generator=int(found["generator"]),
                reward=found["reward"],
                scorer=scorer,
                num_scorers=num_scorers,
            )
    if _METRICS.fullmatch(path):
        return StoredStream(path=path, kind="metrics")
    if path in _SINGLE:
        return StoredStream(path=path, kind=_SINGLE[path])
    return None
