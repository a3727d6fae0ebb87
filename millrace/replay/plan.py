"""In which batches the groups of one or several stored runs are trained on.

    source 0, share 3   a0 a1 a2 a3 a4 a5 …  ─┐  stored: as they lie; shuffled: each source by itself
                                              ├─► a0 a1 b0 a2 │ a3 a4 b1 a5 │ …   batches of groups_per_step
    source 1, share 1   b0 b1 b2 …           ─┘

Of one source in stored order, whole steps and the run's own groups_per_step give the original batches.
"""

import math
from collections.abc import Iterator, Sequence
from fractions import Fraction
from itertools import islice, takewhile
from typing import Literal

import numpy as np
import numpy.typing as npt

from millrace.replay.stored import StoredRun

Order = Literal["stored", "shuffled"]
Batch = list[tuple[int, int]]
"""(index of the source, row of its `groups`) of each group that a step trains, in order."""


def plan(
    sources: Sequence[tuple[StoredRun, npt.NDArray[np.int64], float]],
    *,
    groups_per_step: int,
    order: Order,
    seed: int,
    max_steps: int | None,
) -> list[Batch]:
    """Batches of `groups_per_step` groups each, at most `max_steps` of them; `seed` decides what is shuffled how.

    `sources` are runs with the rows chosen of them and their shares: positive, and relative to each other. However far
    one reads, the number of groups of each source is its share of them, rounded up or down. The plan ends where the
    source whose turn it is has no more; groups that do not fill a last batch are left out.
    """
    random = np.random.default_rng(seed)
    rows = [random.permutation(chosen) if order == "shuffled" else chosen for _, chosen, _ in sources]
    turns = _turns([share for _, _, share in sources], [len(chosen) for chosen in rows])
    groups = ((source, int(rows[source][place])) for source, place in turns)
    whole = takewhile(lambda batch: len(batch) == groups_per_step, _cut(groups, groups_per_step))
    return list(islice(whole, max_steps))


def _turns(shares: Sequence[float], sizes: Sequence[int]) -> Iterator[tuple[int, int]]:
    """(source, place in it), source by source in turn, until the one whose turn it is has no more."""
    # As they were written: of 2.6 and 5.2 the first is a third.
    fractions = [Fraction(repr(share)) for share in shares]
    whole = math.lcm(*(fraction.denominator for fraction in fractions))
    weights = [int(fraction * whole) for fraction in fractions]
    total = sum(weights)
    taken = [0] * len(shares)
    # Balinski and Young's quota method (1975): no count ever leaves its quota, rounded up or down.
    for number in range(1, sum(sizes) + 1):
        below = [source for source, weight in enumerate(weights) if taken[source] * total < weight * number]
        source = max(below, key=lambda one: weights[one] / (taken[one] + 1))
        if taken[source] == sizes[source]:
            return
        yield source, taken[source]
        taken[source] += 1


def _cut(groups: Iterator[tuple[int, int]], size: int) -> Iterator[Batch]:
    while batch := list(islice(groups, size)):
        yield batch
