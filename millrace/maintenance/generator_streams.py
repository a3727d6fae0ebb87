"""Streams whose parts gc removes oldest first, and which parts are still needed.

║ trajectories/<g> ║             part k ──┐
║ scores/<reward>/<g>/<s>-of-S ║ part j ──┴─► one StoredPart, where k = j·S + s; one score part per set of scores
║ trainer_logprobs ║             part k ────► one StoredPart: no stage needs it
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from millrace.maintenance.listing import Contents, StoredStream
from storage import layout
from storage.checkpoints import Checkpoint
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import read_removed


@dataclass(kw_only=True)
class StoredPart:
    """A part of trajectories with its scores, or of the trainer's log-probabilities."""

    ordinal: int
    """Its number in the stream, from 0."""
    max_policy_version: int
    """Newest policy version that sampled any of its rows, or that any of them was trained for."""
    t: float = 0.0
    """When its file was written, unix seconds; 0 if it is gone."""
    files: dict[str, int] = field(default_factory=dict)
    """Path → bytes of each of its files that exists."""

    @property
    def bytes(self) -> int:
        """Size of the existing files."""
        return sum(self.files.values())


@dataclass(kw_only=True)
class GeneratorStream:
    """One generator's parts, or the trainer's log-probabilities."""

    path: str
    """Folder of its trajectories, or `trainer_logprobs`."""
    parts: list[StoredPart]
    removed: int
    """Parts that were removed before."""
    needed: int
    """The first part that a kept checkpoint, a scorer or the generator itself still needs."""
    scores: list[StoredStream] = field(default_factory=list)

    def bytes_from(self, first: int) -> int:
        """Size of the existing files of all parts from number `first` on."""
        return sum(part.bytes for part in self.parts[first:])

    def marks(self, end: int) -> dict[str, int]:
        """For each of its streams, how many parts are gone once the trajectory parts before `end` are."""
        ends = {s.path: layout.num_scored_parts(s.scorer, end, s.num_scorers) for s in self.scores}
        return {self.path: end} | {path: count for path, count in ends.items() if count > 0}


def generator_streams(
    contents: Contents, data: Mapping[str, list[Record]], kept: list[Checkpoint]
) -> list[GeneratorStream]:
    """The streams of a run whose checkpoints `kept` must stay resumable. `data`: stream → its data records."""
    streams = [_generator_stream(contents, stream, data, kept) for stream in contents.of_kind("trajectories")]
    for stream in contents.of_kind("trainer_logprobs"):
        parts = [_part(contents, stream, record) for record in data[stream.path]]
        removed = read_removed(contents.store, stream.path)
        # No stage reads these parts, so all of them may go, except those newer than the listing.
        listed = max((part.ordinal + 1 for part in parts if part.files), default=0)
        streams.append(GeneratorStream(path=stream.path, parts=parts, removed=removed, needed=max(removed, listed)))
    return streams


def _generator_stream(
    contents: Contents, stream: StoredStream, data: Mapping[str, list[Record]], kept: list[Checkpoint]
) -> GeneratorStream:
    records = data[stream.path]
    parts = [_part(contents, stream, record) for record in records]
    sets = contents.scores_of(stream.generator)
    needed = min((_first_read(checkpoint.state, stream.generator) for checkpoint in kept), default=0)
    needed = min(needed, len(records))
    for streams in sets.values():
        for scorer, scores in enumerate(streams):
            if scores is None:
                needed = min(needed, scorer)
                continue
            needed = min(needed, scores.trajectory_part(len(data[scores.path])))
            for ordinal, record in enumerate(data[scores.path]):
                parts[scores.trajectory_part(ordinal)].files |= _part(contents, scores, record).files
    return GeneratorStream(
        path=stream.path,
        parts=parts,
        removed=read_removed(contents.store, stream.path),
        needed=needed if sets else 0,
        scores=[scores for streams in sets.values() for scores in streams if scores is not None],
    )


def _part(contents: Contents, stream: StoredStream, record: Record) -> StoredPart:
    part = StoredPart(ordinal=record.part, max_policy_version=record.max_policy_version)
    if (entry := contents.entries.get(f"{stream.path}/{record.file}")) is not None:
        part.t, part.files = entry.t_modified, {entry.path: entry.bytes}
    return part


def _first_read(state: dict[str, Any], generator: int) -> int:
    """The first part of a generator that a loader opened at a checkpoint reads; 0 if that has no cursors of it."""
    if generator >= len(state["intake"]):
        return 0
    cursors = state["intake"][generator]
    scores = [LogCursor.from_json(cursor).part for cursor in cursors["scores"]]
    scored = [layout.scored_part(scorer, part, len(scores)) for scorer, part in enumerate(scores)]
    return min(LogCursor.from_json(cursors["trajectories"]).part, *scored)
