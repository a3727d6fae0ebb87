"""The trainer's side of the streams: trajectories zipped with their scores, handed out group by group, exactly once.

    ║ trajectories/<g> ║ part k ─────────────────┐
                                                 ├─► zip by row ─► groups, in stream order ─► take
    ║ scores/<reward>/<g>/<k mod S>-of-S ║ part ─┘

One lane a generator. The trainer takes groups from the front of the lanes, oldest weights first. `state` says how far
it took them, as cursors that a checkpoint carries: an intake opened with it goes on at the very next group.

A part whose file is damaged, while its commit record is sound, is handed out as what it is: a `LostPart`. How much is
lost is known, and the parts behind it are not held up.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from millrace.ledger import Amount
from millrace.scored import LostPart, ScoredGroup, zip_groups
from storage import layout
from storage.errors import PartCorrupt, StreamCorrupt
from storage.log import LogCursor
from storage.record import Record
from storage.schema import SCORE, TRAJECTORY
from storage.store import Store
from storage.stream import Part, StreamReader


@dataclass(kw_only=True)
class _PartInHand:
    """A zipped part whose groups were not all taken yet, and where its streams stood before it."""

    trajectories_before: LogCursor
    scores_before: LogCursor
    scorer: int
    groups: deque[ScoredGroup | LostPart]
    taken: Amount


class _Lane:
    """One generator's trajectories and scores."""

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
        self.parts: deque[_PartInHand] = deque()
        self._skip = Amount.from_json(state["taken"]) if "taken" in state else Amount()

    def refill(self) -> None:
        """Zips what was scored since the last look."""
        while (part := self._next()) is not None:
            self._skip = Amount()
            self.parts.append(part)

    def _next(self) -> _PartInHand | None:
        """The next part with its scores, less what had been taken of it before."""
        number = self._trajectories.cursor.part
        scorer = number % len(self._scores)
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
            return _PartInHand(**before, scorer=scorer, groups=groups, taken=self._skip)
        part = _PartInHand(**before, scorer=scorer, groups=groups, taken=Amount())
        while part.groups and part.taken != self._skip:
            part.taken += part.groups.popleft().amount()
        return part

    def _zip(self, trajectories: Part | None, scores: Part, scorer: int) -> list[ScoredGroup]:
        record = self._found(None if trajectories is None else trajectories.record, scores.record.part)
        assert trajectories is not None
        if record.vocab_size not in (0, self._vocab_size):
            raise StreamCorrupt(
                f"{layout.trajectories(self.generator)}/{record.seg}",
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
        """All that was taken of this lane since the run began, by the cursors' own count."""
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


class Intake:
    """Every lane of a run. `state` is what an earlier `state()` returned, or None at the beginning."""

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
        self._lanes = [_Lane(store, reward, g, num_scorers, vocab_size, states[g]) for g in range(num_generators)]

    def take(self) -> ScoredGroup | LostPart | None:
        """The next group, or lost part: of those in front, the one with the oldest weights. None while there is none.

        Raises StreamCorrupt where a commit record is damaged, or where streams do not fit together or to the policy.
        """
        for lane in self._lanes:
            lane.refill()
        heads = [(*_age(head), lane) for lane in self._lanes if (head := lane.head())]
        if not heads:
            return None
        return min(heads, key=lambda entry: entry[:2])[2].take()

    def consumed(self) -> list[Amount]:
        """All that was ever taken, by generator, by the cursors' own count."""
        return [lane.consumed() for lane in self._lanes]

    def state(self) -> list[dict[str, Any]]:
        """How far groups were taken, as JSON for a checkpoint."""
        return [lane.state() for lane in self._lanes]


def _age(head: ScoredGroup | LostPart) -> tuple[int, int]:
    """What the order among lanes goes by: oldest weights, then group number."""
    if isinstance(head, LostPart):
        return head.record.min_policy_version, head.record.last_group_id
    return head.min_policy_version, head.group_id
