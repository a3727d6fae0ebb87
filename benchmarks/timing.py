"""Comparable timings on a machine with other load.

round 0 (not counted)   a b c
round 1                 b c a        every round runs all contenders, each time in another order;
round 2                 c a b        ratios are computed within a round, and their median is reported
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

Prepare = Callable[[], Callable[[], object]]
"""Prepares a contender, untimed, and returns the call to be timed."""


def in_turn(contenders: Mapping[str, Prepare], turn: int) -> dict[str, float]:
    """One round: the seconds of each contender's call; the round's number `turn` decides which comes first."""
    names = list(contenders)
    first = turn % len(names)
    return {name: _seconds(contenders[name]()) for name in names[first:] + names[:first]}


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median over the rounds of `over` ÷ `under`, both of the same round."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def _seconds(call: Callable[[], object]) -> float:
    # The returned value is freed after the end time is taken.
    start = time.perf_counter()
    returned = call()
    end = time.perf_counter()
    del returned
    return end - start
