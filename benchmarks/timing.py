"""Comparable timings on a machine with other load.

round 0 (not counted)   a b c
round 1                 b c a        every round runs all contenders, each time in another order;
round 2                 c a b        ratios are computed within a round, and their median is reported
"""

import cProfile
import pstats
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

_STORAGE = Path(__file__).parents[1] / "storage"


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


def profile(calls: Iterable[Callable[[], object]], least: float = 0.04) -> dict[str, float]:
    """Shares of the time of `calls` spent in each function of storage/ and in each built-in function.

    A function of storage/ includes the functions it calls, so shares overlap; those below `least` are left out.
    Covers this thread only. `calls` may be lazy: preparing them is not timed.
    """
    profiler = cProfile.Profile()
    for call in calls:
        profiler.runcall(call)
    found = pstats.Stats(profiler).stats  # type: ignore[attr-defined]  # not in typeshed
    total = sum(own for _, _, own, _, _ in found.values())
    shares: dict[str, float] = {}
    for (file, _, name), (_, _, own, inclusive, _) in found.items():
        if file == "~":
            shares[name.strip("<>")] = own / total
        elif _STORAGE in Path(file).parents and not name.startswith("<"):
            shares[f"{Path(file).stem}.{name}"] = inclusive / total
    chosen = {name: share for name, share in shares.items() if share >= least}
    return dict(sorted(chosen.items(), key=lambda item: -item[1]))


def _seconds(call: Callable[[], object]) -> float:
    # The returned value is freed after the end time is taken.
    start = time.perf_counter()
    returned = call()
    end = time.perf_counter()
    del returned
    return end - start
