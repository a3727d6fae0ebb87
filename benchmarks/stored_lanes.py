"""The trajectories of a made-up run and their scores: written as generators and scorers do, taken as the trainer does.

rollouts ─► ║ trajectories/<g> ║ part k ─► ║ scores/<reward>/<g>/<k mod S>-of-S ║
                          └──────────────────────┴─► take: the cursors of a checkpoint stand behind all of it
"""

from typing import Any

from benchmarks.stored_groups import VOCAB_SIZE, Rollouts, score_rows, trajectory_rows
from millrace.ledger import Amount
from storage import layout
from storage.log import LogReader
from storage.schema import SCORE, TRAJECTORY
from storage.store import Store
from storage.stream import StreamWriter

_REWARD = "exact_match"


class StoredLanes:
    """The streams of every generator of a run, and of those who score what it makes."""

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
        """The row_id due, by generator."""
        return [writer.rows for writer in self._trajectories]

    def write(self, rollouts: Rollouts, incarnation: int, *, unscored: int = -1) -> None:
        """Commits a part to each generator's stream, and its scores, but for generator `unscored`."""
        for g, writer in enumerate(self._trajectories):
            chosen = rollouts.of("generator") == g
            if not chosen.any():
                continue
            amounts = {
                "tokens": int(rollouts.tokens[chosen].sum()),
                "min_policy_version": int(rollouts.of("min_version")[chosen].min()),
                "max_policy_version": int(rollouts.max_version[chosen].max()),
            }
            scores = self._scores[g][writer.parts % len(self._scores[g])]
            writer.write(
                trajectory_rows(rollouts, g, incarnation=incarnation, epoch=writer.epoch),
                incarnation=incarnation,
                last_group_id=int(rollouts.of("group_id")[chosen].max()),
                **amounts,
            )
            if g != unscored:
                scores.write(score_rows(rollouts, g), **amounts)

    def take(self) -> None:
        """All that was written so far is the trainer's now."""
        for g, reader in enumerate(self._taken):
            reader.to_head()
            for scores in self._scores_taken[g]:
                scores.to_head()

    def consumed(self) -> list[Amount]:
        """What was taken, by generator."""
        return [Amount(rollouts=reader.cursor.rows, tokens=reader.cursor.tokens) for reader in self._taken]

    def state(self) -> list[dict[str, Any]]:
        """How far was taken, as `millrace.intake.Intake.state` says it."""
        return [
            {
                "trajectories": reader.cursor.to_json(),
                "scores": [scores.cursor.to_json() for scores in self._scores_taken[g]],
                "taken": Amount().to_json(),
            }
            for g, reader in enumerate(self._taken)
        ]
