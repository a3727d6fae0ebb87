"""Trajectories joined with their scores, handed to the trainer group by group, each exactly once.

    ║ trajectories/<g> ║ part k ─────────────────┐
                                                 ├─► zip by row ─► groups, in stream order ─► take
    ║ scores/<reward>/<g>/<k mod S>-of-S ║ part ─┘

The loader reads one `_GeneratorStream` per generator and takes, of the groups at their fronts, the one with the oldest
weights. `state` holds the position as cursors for a checkpoint: a loader opened with it continues at the next group.

A part whose file is damaged, while its commit record is sound, comes out as a `LostPart`. Its record says how much is
lost, and the parts after it are not held up.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.rollouts.ledger import Amount
from millrace.rollouts.scored_group import LostPart, ScoredGroup, zip_groups
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.schema import SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogCursor
from storage.streams.record import Record
from storage.streams.stream import Part, StreamReader


@dataclass(kw_only=True)
class _OpenPart:
    """A zipped part with groups left to take, and the position of its streams before it."""

    trajectories_before: LogCursor
    scores_before: LogCursor
    scorer: int
    groups: deque[ScoredGroup | LostPart]
    taken: Amount


class _GeneratorStream:
    """One generator's trajectories with their scores."""

    def __init__(
        self,
        store: Store,
        reward: str,
        generator: int,
        num_scorers: int,
        vocab_size: int,
        state: dict[str, Any] | None,
    ) -> None:
        self.generator = generator
        self._vocab_size = vocab_size
        state = state or {"trajectories": LogCursor().to_json(), "scores": [LogCursor().to_json()] * num_scorers}
        self._trajectories = StreamReader(
            store, layout.trajectories(generator), TRAJECTORY, LogCursor.from_json(state["trajectories"])
        )
        self._score_paths = [layout.scores(reward, generator, s, num_scorers) for s in range(num_scorers)]
        self._scores = [
            StreamReader(store, path, SCORE, LogCursor.from_json(cursor))
            for path, cursor in zip(self._score_paths, state["scores"], strict=True)
        ]
        self.parts: deque[_OpenPart] = deque()
        self._skip = Amount.from_json(state["taken"]) if "taken" in state else Amount()

    def refill(self) -> None:
        """Zips the parts scored since the last call."""
        while (part := self._next()) is not None:
            self._skip = Amount()
            self.parts.append(part)

    def _next(self) -> _OpenPart | None:
        """The next part with its scores, without the groups taken from it before."""
        number = self._trajectories.cursor.part
        scorer = layout.scorer_of_part(number, len(self._scores))
        before = {"trajectories_before": self._trajectories.cursor, "scores_before": self._scores[scorer].cursor}
        groups: deque[ScoredGroup | LostPart]
        try:
            if (scores := self._scores[scorer].next()) is None:
                return None
            groups = deque(self._zip(self._trajectories.next(), scores, scorer))
        except PartCorrupt as error:
            if self._scores[scorer].cursor.part == before["scores_before"].part:
                self._scores[scorer].next_record()
            groups = deque([self._lost(self._trajectories.next_record(), number, str(error))])
            return _OpenPart(**before, scorer=scorer, groups=groups, taken=self._skip)
        part = _OpenPart(**before, scorer=scorer, groups=groups, taken=Amount())
        while part.groups and part.taken != self._skip:
            part.taken += part.groups.popleft().amount()
        return part

    def _zip(self, trajectories: Part | None, scores: Part, scorer: int) -> list[ScoredGroup]:
        record = self._found(None if trajectories is None else trajectories.record, scores.record.part)
        assert trajectories is not None
        if record.vocab_size not in (0, self._vocab_size):
            raise StreamCorrupt(
                f"{layout.trajectories(self.generator)}/{record.file}",
                f"its tokens are of a vocabulary of {record.vocab_size}, but the policy's has {self._vocab_size}",
                record.seq,
            )
        return zip_groups(trajectories, scores, self.generator, self._score_paths[scorer])

    def _lost(self, record: Record | None, number: int, reason: str) -> LostPart:
        record = self._found(record, number)
        left = Amount(rollouts=record.rows, tokens=record.tokens) - self._skip
        return LostPart(generator=self.generator, record=record, left=left, reason=reason)

    def _found(self, record: Record | None, number: int) -> Record:
        if record is None:
            raise StreamCorrupt(layout.trajectories(self.generator), f"part {number} is missing, but it was scored")
        return record

    def take(self) -> ScoredGroup | LostPart:
        part = self.parts[0]
        group = part.groups.popleft()
        part.taken += group.amount()
        if not part.groups:
            self.parts.popleft()
        return group

    def head(self) -> ScoredGroup | LostPart | None:
        return self.parts[0].groups[0] if self.parts else None

    def consumed(self) -> Amount:
        """Everything taken from this generator since the run began, by the count of its cursors."""
        if self.parts:
            cursor, taken = self.parts[0].trajectories_before, self.parts[0].taken
        else:
            cursor, taken = self._trajectories.cursor, self._skip
        return Amount(rollouts=cursor.rows, tokens=cursor.tokens) + taken

    def state(self) -> dict[str, Any]:
        first = self.parts[0] if self.parts else None
        scores = [reader.cursor for reader in self._scores]
        for part in reversed(self.parts):
            scores[part.scorer] = part.scores_before
        return {
            "trajectories": (first.trajectories_before if first else self._trajectories.cursor).to_json(),
            "scores": [cursor.to_json() for cursor in scores],
            "taken": (first.taken if first else self._skip).to_json(),
        }


class RolloutLoader:
    """The scored groups of a run. `state` is what an earlier `state()` returned, or None at the beginning."""

    def __init__(
        self,
        store: Store,
        *,
        reward: str,
        num_generators: int,
        num_scorers: int,
        vocab_size: int,
        state: list[dict[str, Any]] | None,
    ) -> None:
        states: Sequence[dict[str, Any] | None] = [None] * num_generators if state is None else state
        self._streams = [
            _GeneratorStream(store, reward, g, num_scorers, vocab_size, states[g]) for g in range(num_generators)
        ]

    def take(self) -> ScoredGroup | LostPart | None:
        """The next group or lost part: of all generators' next ones, the one with the oldest weights. None if none.

        Raises StreamCorrupt where a commit record is damaged, or where the streams do not match each other or the
        policy's vocabulary.
        """
        for stream in self._streams:
            stream.refill()
        heads = [(*_age(head), stream) for stream in self._streams if (head := stream.head())]
        if not heads:
            return None
        return min(heads, key=lambda entry: entry[:2])[2].take()

    def consumed(self) -> list[Amount]:
        """Everything ever taken, by generator, by the count of the cursors."""
        return [stream.consumed() for stream in self._streams]

    def state(self) -> list[dict[str, Any]]:
        """The position after the last group taken, as JSON for a checkpoint."""
        return [stream.state() for stream in self._streams]


def _age(head: ScoredGroup | LostPart) -> tuple[int, int]:
    """The order among generators: oldest weights, then group number."""
    if isinstance(head, LostPart):
        return head.record.min_policy_version, head.record.last_group_id
    return head.min_policy_version, head.group_id
