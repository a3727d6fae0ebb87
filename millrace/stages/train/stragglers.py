"""Groups that the next step would leave too old, which the trainer waits for: `staleness.too_old: wait`.

    trainer at t, about to make t + 1; bound η       a group admitted under version v is trained at t + 1 or later,
                                                     so it would be too old if t + 1 − v > η
    in flight    status records of the generators ─┐
    unscored     commit records ahead of the scores ┴─► the oldest v ─► wait?

The trainer takes nothing while it waits, and then the oldest groups first. Admission leaves at most a step's worth of
groups that must not wait longer, so all of them are in the next step. It leaves more if younger groups overtook some of
them in earlier steps, and a status record may be late: a group can be too old all the same. Then it is dropped.

A generator that was killed keeps its last record until its successor writes one. A generator that has been silent for
`supervision.hang_seconds` counts as idle: one that never returns must not hold the trainer for ever.
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
        """Whether a step from `trainer_version` leaves no group too old, by the bound in force after it.

        Raises as `RolloutLoader.take`.
        """
        # Generators first: a group that is no longer in flight is committed already.
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
