"""What a run's folder holds: one listing, and the logs that say which of the listed files are committed.

    entries (listed first) ─► streams, checkpoints, weights ─► their logs (read after) ─► records

Because of this order, a listed file that no record names was not committed when the listing was made.
Only maintenance lists a run. Stages never do.
"""

import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import pyarrow as pa

from millrace.errors import RunMissing
from millrace.evaluation.results import Result, ResultsReader, best_result
from millrace.runs.record import latest_attempt, read_run
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.checkpoints import Checkpoint, checkpoint_of
from storage.errors import StreamCorrupt, damaged_record
from storage.schema import CONSUMED, METRIC, SCORE, TRAINER_LOGPROBS, TRAJECTORY, UNFINISHED
from storage.stores.base import Entry, Store
from storage.streams.log import LogCursor, LogReader
from storage.streams.record import Record

_IN_A_STREAM = re.compile(r"(streams/.+)/(?:log|seg)/[^/]+")

Kind = Literal["consumed", "metrics", "scores", "trainer_logprobs", "trajectories", "unfinished"]
"""In the order in which the logs must be read: no stream refers to rows of a kind before its own."""
_SCORES = r"streams/scores/(?P<reward>[^/]+)/(?P<generator>\d+)/(?P<scorer>\d+)-of-(?P<num_scorers>\d+)"
_KINDS: dict[Kind, tuple[str, pa.Schema]] = {
    "consumed": (layout.CONSUMED, CONSUMED),
    "metrics": (r"streams/metrics/[^/]+-\d+", METRIC),
    "scores": (_SCORES, SCORE),
    "trainer_logprobs": (layout.TRAINER_LOGPROBS, TRAINER_LOGPROBS),
    "trajectories": (r"streams/trajectories/(?P<generator>\d+)", TRAJECTORY),
    "unfinished": (r"streams/unfinished/(?P<generator>\d+)", UNFINISHED),
}
"""Kind → the paths of its streams, whose named groups are fields of StoredStream, and their schema."""


@dataclass(frozen=True, kw_only=True)
class StoredStream:
    """One stream of a run, as its path describes it."""

    path: str
    """Its folder, relative to the run."""
    kind: Kind
    generator: int = 0
    """trajectories, scores: which generator made the trajectories."""
    reward: str = ""
    """scores: the reward's name."""
    scorer: int = 0
    """scores: which scorer writes it."""
    num_scorers: int = 1
    """scores: it holds the scores of the trajectory parts k with k mod num_scorers = scorer."""

    @property
    def name(self) -> str:
        """Its path below `streams/`."""
        return self.path.removeprefix("streams/")

    @property
    def schema(self) -> pa.Schema:
        """Columns of its parts."""
        return _KINDS[self.kind][1]

    def trajectory_part(self, part: int) -> int:
        """scores: the trajectory part that its part number `part` scores."""
        return layout.scored_part(self.scorer, part, self.num_scorers)


class Contents:
    """A run, or its folder `below`, as listed at one moment. Raises RunMissing where there is no run."""

    def __init__(self, store: Store, below: str = "") -> None:
        if not store.exists(layout.RUN):
            raise RunMissing(f"no run at {store.url}: expected {layout.RUN} there")
        self.store = store
        self.entries: dict[str, Entry] = {entry.path: entry for entry in store.entries(below)}

    @cached_property
    def streams(self) -> list[StoredStream]:
        """Every stream with a record or a part file, sorted by kind, generator and path.

        Logs read in this order never show a score whose trajectory is not committed yet.
        """
        paths = {match[1] for path in self.entries if (match := _IN_A_STREAM.fullmatch(path))}
        streams = [stream for path in paths if (stream := _stream(path)) is not None]
        return sorted(streams, key=lambda stream: (stream.kind, stream.generator, stream.path))

    def of_kind(self, kind: Kind) -> list[StoredStream]:
        """The streams of one kind; trajectories by generator."""
        return [stream for stream in self.streams if stream.kind == kind]

    def scores_of(self, generator: int) -> dict[tuple[str, int], list[StoredStream | None]]:
        """(reward, S) → the S score streams of that generator's trajectories, by scorer; None where one is missing."""
        sets: dict[tuple[str, int], list[StoredStream | None]] = {}
        for stream in self.of_kind("scores"):
            if stream.generator == generator:
                key = (stream.reward, stream.num_scorers)
                sets.setdefault(key, [None] * stream.num_scorers)[stream.scorer] = stream
        return sets

    def below(self, folder: str) -> list[Entry]:
        """The files listed below a folder, sorted by path."""
        return [entry for path, entry in self.entries.items() if path.startswith(f"{folder}/")]

    def log(self, path: str) -> Iterator[tuple[Record, LogCursor]]:
        """The records of the log in the folder `path`, each with the cursor behind it.

        Raises StreamCorrupt for a damaged record, and for a missing one if later ones are listed.
        """
        reader = LogReader(self.store, path)
        while (record := reader.next()) is not None:
            yield record, reader.cursor
        missing = f"{path}/{layout.record(reader.cursor.seq)}"
        later = [
            entry.path
            for entry in self.below(f"{path}/log")
            if layout.record_seq(entry.path) is not None and entry.path >= missing
        ]
        if later:
            raise damaged_record(missing, f"the record is missing, but {len(later)} later ones exist")

    def checkpoints(self, root: str = layout.CHECKPOINTS) -> list[Checkpoint]:
        """All checkpoint records of the log in the folder `root`, oldest first. Raises StreamCorrupt."""
        return [checkpoint_of(record, root) for record, _ in self.log(root) if record.kind == "checkpoint"]


def best_stored(store: Store, checkpoints: Iterable[Checkpoint], *, base_model: bool) -> Result | None:
    """The best result of these checkpoints, and of the base model if it counts; None if none was evaluated."""
    stored = {(checkpoint.step, weights_checksum(checkpoint)) for checkpoint in checkpoints}
    return best_result(
        [
            result
            for result in ResultsReader(store).read()
            if (base_model and result["policy_version"] == 0)
            or (result["policy_version"], result.get("weights_checksum")) in stored
        ]
    )


def run_id(store: Store) -> str:
    """The run's name. Raises StreamCorrupt if `run.json` does not give it."""
    with _damage_of_run_record():
        return str(read_run(store)["run_id"])


def run_scoring(store: Store) -> tuple[str, int]:
    """The reward's name and the number of scorers, from the config of the latest attempt. Raises StreamCorrupt."""
    with _damage_of_run_record():
        scoring = latest_attempt(store).config["scoring"]
        return scoring["reward"], scoring["replicas"]


@contextmanager
def _damage_of_run_record() -> Iterator[None]:
    try:
        yield
    except (ValueError, KeyError, TypeError) as error:
        reason = f"this file, or the record of a later attempt, lacks what it should hold: {error!r}"
        raise StreamCorrupt(layout.RUN, reason) from error


def _stream(path: str) -> StoredStream | None:
    for kind, (pattern, _) in _KINDS.items():
        if match := re.fullmatch(pattern, path):
            fields: dict[str, Any] = match.groupdict()
            fields |= {name: int(value) for name, value in fields.items() if name != "reward"}
            stream = StoredStream(path=path, kind=kind, **fields)
            return stream if stream.scorer < stream.num_scorers else None
    return None
