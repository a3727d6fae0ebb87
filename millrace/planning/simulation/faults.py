"""Failures: how often stages die, and what a dead trainer takes back.

    segment: checkpoint ─► steps ─► the trainer dies ─► recovery ─► the last checkpoint before ─► next segment

A generator's failures are events of the simulation. A trainer's divide the campaign into segments. Each goes like the
beginning of the undisturbed campaign: nothing is in flight. That is a little pessimistic, because generators go on with
responses whose weights still exist.
"""

import math
import random
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

_MOST_FAILURES = 1_000_000
_MOST_GENERATOR_FAILURES = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Faults:
    """Stages that die at random times, independent of each other."""

    generator_mtbf: float = math.inf
    """Mean time between two failures of one generator, seconds."""
    generator_recovery: float = 0.0
    """From its death until it can load weights, seconds."""
    trainer_mtbf: float = math.inf
    """Mean time between two failures of the trainer, whichever of its ranks fails, seconds."""
    trainer_recovery: float = 0.0
    """From its death until it has handed its checkpoint over, seconds."""
    seed: int = 0


class GeneratorFailures:
    """When generators die, and how often they did."""

    def __init__(self, faults: Faults) -> None:
        self.count = 0
        self.recovery = faults.generator_recovery
        self._mtbf = faults.generator_mtbf
        self._rng = random.Random(f"generators:{faults.seed}")

    def next_after(self, t: float) -> float:
        """When a generator dies that is alive at `t`; infinite if it never does."""
        return t + self._rng.expovariate(1 / self._mtbf) if self._mtbf < math.inf else math.inf

    def add(self, policy_version: int) -> None:
        """One more. Raises ValueError once they are so many that the campaign stays at this version of the trainer."""
        self.count += 1
        if self.count > _MOST_GENERATOR_FAILURES:
            raise ValueError(
                f"a generator that fails every {self._mtbf:g} s finishes no response: "
                f"the campaign got no further than version {policy_version}"
            )


def with_trainer_failures(t_made: Sequence[float], checkpoint_every: int, faults: Faults) -> tuple[float, int]:
    """Seconds until the last of `t_made` is reached, and the number of failures on the way.

    `t_made`: when each version is made by a trainer that does not fail, from version 1 on. Raises ValueError if the
    trainer fails so often that it would not get there.
    """
    rng = random.Random(f"trainer:{faults.seed}")
    seconds, version, failures = 0.0, 0, 0
    while True:
        t_done = t_made[len(t_made) - version - 1]
        t_failure = rng.expovariate(1 / faults.trainer_mtbf)
        if t_failure >= t_done:
            return seconds + t_done, failures
        failures += 1
        if failures > _MOST_FAILURES:
            raise ValueError(
                f"a trainer that fails every {faults.trainer_mtbf:g} s gets no further than version {version}"
            )
        seconds += t_failure + faults.trainer_recovery
        # The last one that it makes before, and of those the last with a checkpoint.
        reached = version + bisect_right(t_made, t_failure)
        version = max(version, reached - reached % checkpoint_every)
