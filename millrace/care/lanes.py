"""Parts of rows that go in the order of their stream, and which of them somebody still needs: a lane a stream.

║ trajectories/<g> ║             part k ──┐
║ scores/<reward>/<g>/<s>-of-S ║ part j ──┴─► one StoredPart, where k = j·S + s; one score part a set of scores
║ trainer_logprobs ║             part k ────► one StoredPart: nobody needs it to go on
"""

from dataclasses import dataclass, field

from millrace.care.contents import Contents, StoredFiles, StoredStream
from storage.log import LogCursor
from storage.record import Record
from storage.stream import read_removed


@dataclass(kw_only=True)
class StoredPart:
    """A part of trajectories with its scores, or of the trainer's log-probabilities."""

    ordinal: int
    """Place in its stream, from 0."""
    max_policy_version: int
    """Newest policy version that sampled any of its rows; that any of them was trained for."""
    schema_version: int
    t: float
    """When its file was written, unix seconds; 0 where it is gone."""
    files: dict[str, int] = field(default_factory=dict)
    """Path → bytes of each of its files that is there."""

    @property
    def bytes(self) -> int:
        """Size of the files that are there."""
        return sum(self.files.values())

    def described(self) -> str:
        """In a few words, for people."""
        return f"part {self.ordinal}, versions up to {self.max_policy_version}"


@dataclass(kw_only=True)
class Lane:
    """One generator's parts, or the trainer's."""

    path: str
    """Of its stream: of trajectories, or `trainer_logprobs`."""
    parts: list[StoredPart]
    removed: int
    """Parts that were removed before."""
    needed: int
    """The first part that a kept checkpoint, a scorer or the generator itself still needs."""
    scores: list[StoredStream] = field(default_factory=list)

    def marks(self, end: int) -> dict[str, int]:
        """For each of its streams, how many parts are gone once the trajectory parts before `end` are."""
        # Part j of scorer s is gone if j·S + s < end.
        ends = {stream.path: -((stream.scorer - end) // stream.num_scorers) for stream in self.scores}
        return {self.path: end} | {path: count for path, count in ends.items() if count > 0}


def open_lanes(contents: Contents, kept: list[StoredFiles]) -> list[Lane]:
    """The lanes of a run whose checkpoints `kept` must stay resumable. Raises StreamCorrupt."""
    # Scores are read first, so that each of them finds its trajectories.
    scored = {s.path: _data(contents, s) for s in contents.streams if s.kind == "scores"}
    lanes = [_lane(contents, stream, scored, kept) for stream in contents.trajectories()]
    return lanes + [_trainer_lane(contents, stream) for stream in contents.streams if stream.kind == "trainer_logprobs"]


def _lane(contents: Contents, stream: StoredStream, scored: dict[str, list[Record]], kept: list[StoredFiles]) -> Lane:
    assert stream.generator is not None
    records = _data(contents, stream)
    parts = [_part(contents, stream, record) for record in records]
    needed = min(_needed_by_checkpoints(stream.generator, kept), _needed_by_generator(records))
    sets = contents.scores_of(stream.generator)
    for streams in sets.values():
        for scorer, one in enumerate(streams):
            if one is None:
                needed = min(needed, scorer)
                continue
            needed = min(needed, one.trajectory_part(len(scored[one.path])))
            for ordinal, record in enumerate(scored[one.path]):
                _add_file(parts[one.trajectory_part(ordinal)], contents, f"{one.path}/{record.seg}")
    return Lane(
        path=stream.path,
        parts=parts,
        removed=read_removed(contents.store, stream.path),
        needed=needed if sets else 0,
        scores=[one for streams in sets.values() for one in streams if one is not None],
    )


def _trainer_lane(contents: Contents, stream: StoredStream) -> Lane:
    """No stage ever reads these parts: all of them may go that are not younger than the listing."""
    parts = [_part(contents, stream, record) for record in _data(contents, stream)]
    removed = read_removed(contents.store, stream.path)
    needed = max((part.ordinal + 1 for part in parts if part.files), default=0)
    return Lane(path=stream.path, parts=parts, removed=removed, needed=max(removed, needed))


def _add_file(part: StoredPart, contents: Contents, path: str) -> None:
    if path in contents.entries:
        part.files[path] = contents.entries[path].bytes


def _data(contents: Contents, stream: StoredStream) -> list[Record]:
    return [record for record, _ in contents.log(stream.path) if record.kind == "data"]


def _part(contents: Contents, stream: StoredStream, record: Record) -> StoredPart:
    path = f"{stream.path}/{record.seg}"
    entry = contents.entries.get(path)
    part = StoredPart(
        ordinal=record.part,
        max_policy_version=record.max_policy_version,
        schema_version=record.schema_version,
        t=0.0 if entry is None else entry.t_modified,
    )
    _add_file(part, contents, path)
    return part


def _needed_by_checkpoints(generator: int, kept: list[StoredFiles]) -> int:
    """The first part that an intake opened at any of these would read; 0 where there is none to open at."""
    needed = []
    for checkpoint in kept:
        lanes = checkpoint.record.body["state"]["intake"]
        if generator >= len(lanes):
            return 0
        lane = lanes[generator]
        scorers = lane["scores"]
        needed.append(LogCursor.from_json(lane["trajectories"]).part)
        needed += [LogCursor.from_json(at).part * len(scorers) + scorer for scorer, at in enumerate(scorers)]
    return min(needed, default=0)


def _needed_by_generator(records: list[Record]) -> int:
    """Before schema version 2 a generator that starts looks into its rows for the number of its next group."""
    return next((record.part for record in records if record.schema_version < 2), len(records))
