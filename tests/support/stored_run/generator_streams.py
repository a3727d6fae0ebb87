"""Trajectories of a generated run and their scores: written as by generators and scorers, taken as by the trainer.

rollouts ─► ║ trajectories/<g> ║ part k ─► ║ scores/<reward>/<g>/<k mod S>-of-S ║
                          └──────────────────────┴─► take: the cursors of a checkpoint stand behind all of it
"""

from typing import Any

from support.stored_run.groups import VOCAB_SIZE, Rollouts, score_rows, trajectory_rows

from millrace.rollouts.ledger import Amount
from storage import layout
from storage.schema import SCORE, TRAJECTORY
from storage.stores.base import Store
from storage.streams.log import LogReader
from storage.streams.stream import StreamWriter

_REWARD = "exact_match"


class StoredGeneratorStreams:
    """The streams of all generators of a run, with their scores."""

    def __init__(self, store: Store, *, generators: int, scorers: int, group_size: int) -> None:
        paths = [[layout.scores(_REWARD, g, s, scorers) for s in range(scorers)] for g in range(generators)]
        self._trajectories = [
            StreamWriter(
                store,
                layout.trajectories(g),
                TRAJECTORY,
                f"generate-{g}",
                vocab_size=VOCAB_SIZE,
                group_size=group_size,
            )
            for g in range(generators)
        ]
        self._scores = [
            [StreamWriter(store, path, SCORE, f"score-{s}") for s, path in enumerate(of_generator)]
            for of_generator in paths
        ]
        self._taken = [LogReader(store, layout.trajectories(g)) for g in range(generators)]
        self._scores_taken = [[LogReader(store, path) for path in of_generator] for of_generator in paths]

    @property
    def next_rows(self) -> list[int]:
        """The next row_id, by generator."""
        return [writer.rows for writer in self._trajectories]

    def write(self, rollouts: Rollouts, incarnation: int, *, unscored: int = -1) -> None:
        """Commits a part to each generator's stream, with its scores except for generator `unscored`."""
        for g, writer in enumerate(self._trajectories):
            chosen = rollouts.of("generator") == g
            if not chosen.any():
                continue
            amounts: dict[str, Any] = {
                "tokens": int(rollouts.tokens[chosen].sum()),
                "min_policy_version": int(rollouts.of("min_version")[chosen].min()),
                "max_policy_version": int(rollouts.max_version[chosen].max()),
            }
            scores = self._scores[g][layout.scorer_of_part(writer.parts, len(self._scores[g]))]
            writer.write(
                trajectory_rows(rollouts, g, incarnation=incarnation, epoch=writer.epoch),
                incarnation=incarnation,
                group_ids=list(dict.fromkeys(rollouts.of("group_id")[chosen].tolist())),
                last_group_id=int(rollouts.of("group_id")[chosen].max()),
                **amounts,
            )
            if g != unscored:
                scores.write(score_rows(rollouts, g), **amounts)

    def take(self) -> None:
        """Moves the trainer's cursors behind everything written so far."""
        for g, reader in enumerate(self._taken):
            reader.to_head()
            for scores in self._scores_taken[g]:
                scores.to_head()

    def consumed(self) -> list[Amount]:
        """The amount taken, by generator."""
        return [Amount(rollouts=reader.cursor.rows, tokens=reader.cursor.tokens) for reader in self._taken]

    def state(self) -> list[dict[str, Any]]:
        """How far the trainer has read, as `millrace.rollouts.loader.RolloutLoader.state` returns it."""
        return [
            {
                "trajectories": reader.cursor.to_json(),
                "scores": [scores.cursor.to_json() for scores in self._scores_taken[g]],
                "taken": Amount().to_json(),
            }
            for g, reader in enumerate(self._taken)
        ]
