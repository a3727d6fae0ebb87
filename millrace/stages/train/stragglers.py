"""Stragglers: groups that would be too old after the next step. With `staleness.too_old: wait` the trainer waits.

    trainer at t, about to make t + 1; bound η       a group admitted under version v is trained at t + 1 or later,
                                                     so it would be too old if t + 1 − v > η
    in flight    status records of the generators ─┐
    unscored     commit records ahead of the scores ┴─► the oldest v ─► wait?

The trainer collects nothing while it waits, then the oldest groups first. Admission allows at most a step's worth of
such groups, so all of them fit into the next step. A group can still become too old, and is dropped, if younger groups
overtook it in earlier steps or a status record was late.

A killed generator keeps its last record until its successor writes one. A generator that has been silent for
`supervision.hang_seconds` counts as idle, so that a generator that never returns can't block the trainer.
"""

import time

from millrace.rollouts.loader import RolloutLoader
from millrace.rollouts.staleness import step_leaves_too_old
from millrace.runtime.stage import Stage
from storage.progress import read_status


class Stragglers:
    """The groups that `loader` will return later, by the generators' status records."""

    def __init__(self, stage: Stage, loader: RolloutLoader) -> None:
        self._stage = stage
        self._loader = loader

    def are_in(self, trainer_version: int, max_staleness: int) -> bool:
        """Whether a step from `trainer_version` leaves no group too old under the bound in force after it.

        Raises as `RolloutLoader.take`.
        """
        # Generators first: a group that is no longer in flight has been committed.
        versions = [self._oldest_in_flight(generator) for generator in range(self._stage.config.generation.replicas)]
        versions.append(self._loader.oldest_unscored())
        return not any(
            version is not None and step_leaves_too_old(version, trainer_version, max_staleness) for version in versions
        )

    def _oldest_in_flight(self, generator: int) -> int | None:
        record = read_status(self._stage.store, "generate", generator)
        if time.time() - record.get("t", 0.0) > self._stage.config.supervision.hang_seconds:
            return None
        version: int | None = record.get("oldest_version_in_flight")
        return version
