"""The trainer's side of the streams: trajectories zipped with their scores, handed out group by group, exactly once.

    ║ trajectories/<g> ║ part k ─────────────────┐
                                                 ├─► zip by row ─► groups, in stream order ─► take
    ║ scores/<reward>/<g>/<k mod S>-of-S ║ part ─┘

One lane a generator. The trainer takes groups from the front of the lanes, oldest weights first. `state` says how far
it took them, as cursors that a checkpoint carries: an intake opened with it goes on at the very next group.
"""

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from millrace.ledger import Amount
from millrace.trajectories import list_slices
from storage import layout
from storage.errors import StreamCorrupt
from storage.log import LogCursor, LogReader
from storage.schema import SCORE, TRAJECTORY
from storage.store import Store
from storage.stream import Part, StreamReader


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoredGroup:
    """The trajectories that answer one prompt together, with their scores. G of them."""

    group_id: int
    generator: int
    prompt_tokens: list[npt.NDArray[np.int32]]
    """[G] of [P] token ids."""
    response_tokens: list[npt.NDArray[np.int32]]
    """[G] of [R] token ids."""
    rollout_logprobs: list[npt.NDArray[np.float32]]
    """[G] of [R] log μ of the behaviour policy, nats."""
    loss_mask: list[npt.NDArray[np.uint8]]
    """[G] of [R]."""
    temperature: float
    rewards: list[float | None]
    """[G]; None where the verifier failed."""
    min_policy_version: int
    """Oldest weights that sampled any token of the group."""
    max_policy_version: int
    """Newest ones."""
    incarnation: int
    """Of the trainer whose weights sampled it."""

    def amount(self, members: list[int] | None = None) -> Amount:
        """Rollouts and response tokens of some members, or of all."""
        chosen = range(len(self.rewards)) if members is None else members
        return Amount(rollouts=len(chosen), tokens=sum(len(self.response_tokens[i]) for i in chosen))


@dataclass(kw_only=True)
class _PartInHand:
    """A zipped part whose groups were not all taken yet, and where its streams stood before it."""

    trajectories_before: LogCursor
    scores_before: LogCursor
    scorer: int
    groups: deque[ScoredGroup]
    taken: Amount


class _Lane:
    """One generator's trajectories and scores."""

    def __init__(
        self, store: Store, reward: str, generator: int, num_scorers: int, state: dict[str, Any] | None
    ) -> None:
        self.generator = generator
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
            while part.groups and part.taken != self._skip:
                part.taken += part.groups.popleft().amount()
            self._skip = Amount()
            self.parts.append(part)

    def _next(self) -> _PartInHand | None:
        trajectories_before = self._trajectories.cursor
        scorer = trajectories_before.part % len(self._scores)
        scores_before = self._scores[scorer].cursor
        scores = self._scores[scorer].next()
        if scores is None:
            return None
        trajectories = self._trajectories.next()
        if trajectories is None:
            raise StreamCorrupt(
                layout.trajectories(self.generator), f"part {trajectories_before.part} is missing, but it was scored"
            )
        return _PartInHand(
            trajectories_before=trajectories_before,
            scores_before=scores_before,
            scorer=scorer,
            groups=deque(zip_groups(trajectories, scores, self.generator, self._score_paths[scorer])),
            taken=Amount(),
        )

    def take(self) -> ScoredGroup:
        part = self.parts[0]
        group = part.groups.popleft()
        part.taken += group.amount()
        if not part.groups:
            self.parts.popleft()
        return group

    def head(self) -> ScoredGroup | None:
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
        self, store: Store, *, reward: str, num_generators: int, num_scorers: int, state: list[dict[str, Any]] | None
    ) -> None:
        states: Sequence[dict[str, Any] | None] = [None] * num_generators if state is None else state
        self._lanes = [_Lane(store, reward, g, num_scorers, states[g]) for g in range(num_generators)]

    def take(self) -> ScoredGroup | None:
        """The next group: of those in front, the one with the oldest weights. None while nothing is scored.

        Raises StreamCorrupt where a stream is damaged or the two do not fit together.
        """
        for lane in self._lanes:
            lane.refill()
        heads = [(head.min_policy_version, head.group_id, lane) for lane in self._lanes if (head := lane.head())]
        if not heads:
            return None
        return min(heads, key=lambda entry: entry[:2])[2].take()

    def consumed(self) -> Amount:
        """All that was ever taken, by the cursors' own count."""
        return sum((lane.consumed() for lane in self._lanes), Amount())

    def state(self) -> list[dict[str, Any]]:
        """How far groups were taken, as JSON for a checkpoint."""
        return [lane.state() for lane in self._lanes]


def zip_groups(trajectories: Part, scores: Part, generator: int, scores_path: str) -> list[ScoredGroup]:
    """The groups of a part of trajectories with their scores, which come from the stream in the folder `scores_path`.

    Raises StreamCorrupt where the rows do not correspond.
    """
    table, scored = trajectories.table, scores.table
    if not np.array_equal(table["row_id"].to_numpy(), scored["row_id"].to_numpy()):
        found, expected = scores.record, trajectories.record
        raise StreamCorrupt(
            f"{scores_path}/{found.seg}",
            f"holds the scores of {found.rows} rows from {found.first_row_id} on, "
            f"expected {expected.rows} from {expected.first_row_id} on",
            found.seq,
        )
    group_ids = table["group_id"].to_numpy()
    starts = np.flatnonzero(np.diff(group_ids, prepend=group_ids[0] - 1))
    ends = [*starts[1:].tolist(), len(group_ids)]
    columns = _Columns(table, scored)
    return [columns.group(start, end, generator) for start, end in zip(starts.tolist(), ends, strict=True)]


class _Columns:
    """A zipped part, column by column: lists as views of their flat values."""

    def __init__(self, table: pa.Table, scored: pa.Table) -> None:
        self._lists = {
            name: list_slices(table[name])
            for name in ("prompt_tokens", "response_tokens", "rollout_logprobs", "loss_mask")
        }
        self._numbers = {
            name: table[name].to_numpy()
            for name in ("group_id", "temperature", "min_policy_version", "max_policy_version", "incarnation")
        }
        self._rewards: list[float | None] = scored["reward"].to_pylist()

    def group(self, start: int, end: int, generator: int) -> ScoredGroup:
        lists, numbers = self._lists, self._numbers
        return ScoredGroup(
            group_id=int(numbers["group_id"][start]),
            generator=generator,
            prompt_tokens=lists["prompt_tokens"][start:end],
            response_tokens=lists["response_tokens"][start:end],
            rollout_logprobs=lists["rollout_logprobs"][start:end],
            loss_mask=lists["loss_mask"][start:end],
            temperature=float(numbers["temperature"][start]),
            rewards=self._rewards[start:end],
            min_policy_version=int(numbers["min_policy_version"][start:end].min()),
            max_policy_version=int(numbers["max_policy_version"][start:end].max()),
            incarnation=int(numbers["incarnation"][start]),
        )


def committed(store: Store, *, reward: str, num_generators: int, num_scorers: int) -> "CommittedAmounts":
    """A reader of how much all generators and scorers of a run have committed."""
    return CommittedAmounts(
        generated=[LogReader(store, layout.trajectories(g)) for g in range(num_generators)],
        scored=[
            LogReader(store, layout.scores(reward, g, s, num_scorers))
            for g in range(num_generators)
            for s in range(num_scorers)
        ],
    )


class CommittedAmounts:
    """Sums over commit records; each look reads only the records that are new."""

    def __init__(self, generated: list[LogReader], scored: list[LogReader]) -> None:
        self._generated = generated
        self._scored = scored

    def look(self) -> tuple[Amount, Amount]:
        """(generated, scored) so far. Scored is read first, so it never exceeds generated."""
        scored = amount_committed(self._scored)
        return amount_committed(self._generated), scored


def amount_committed(readers: list[LogReader]) -> Amount:
    """Rollouts and tokens of everything committed to these logs so far; reads only the records that are new."""
    heads = [reader.to_head() for reader in readers]
    return Amount(rollouts=sum(head.rows for head in heads), tokens=sum(head.tokens for head in heads))
