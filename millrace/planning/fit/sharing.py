"""How much slower stages get because they share the cores of a machine.

    threads that are busy ≤ cores: nobody waits for a core         more: each gets cores ÷ threads of one

This is for runs of which only the shares are known: their stages are taken to be busy independently of each other, so
the more of the time others are busy, the slower each gets. The simulation knows who is busy when (`clock.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Load:
    """One process."""

    stage: str
    """`generate`, `score` or `train`."""
    share: float
    """Of the time, in which it does not wait for others."""
    threads: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Slowdowns:
    """How many times as long as alone the work of a stage takes, mean over its time."""

    generate: float = 1.0
    score: float = 1.0
    train: float = 1.0


def slowdowns(loads: Sequence[Load], cores: float) -> Slowdowns:
    """Of each stage that has a process among the loads."""
    first = {load.stage: place for place, load in reversed(list(enumerate(loads)))}
    return Slowdowns(**{stage: expected_slowdown(loads, place, cores) for stage, place in first.items()})


def expected_slowdown(loads: Sequence[Load], place: int, cores: float) -> float:
    """Mean of max(1, busy threads ÷ cores) while the process at `place` is busy."""
    chances = {loads[place].threads: 1.0}
    for other, load in enumerate(loads):
        if other == place:
            continue
        after: dict[int, float] = {}
        for threads, chance in chances.items():
            after[threads] = after.get(threads, 0.0) + chance * (1 - load.share)
            more = threads + load.threads
            after[more] = after.get(more, 0.0) + chance * load.share
        chances = after
    return sum(chance * max(1.0, threads / cores) for threads, chance in chances.items())
