"""How many groups overtook another on their way to the trainer.

taken, in this order    0   2   8   6   4           generator 0 of 2
overtaken by            –   –   –   1   2           8 had been taken before 6; 6 and 8 before 4
"""

from dataclasses import dataclass, field


@dataclass(kw_only=True)
class _Generator:
    first: int
    """The lowest group taken so far."""
    last: int
    """The highest."""
    missing: set[int] = field(default_factory=set)
    """Its numbers between these that were not taken."""


class Overtaking:
    """The order in which a trainer takes the groups of each of `num_generators` generators, since it was started."""

    def __init__(self, num_generators: int) -> None:
        self._num_generators = num_generators
        self._generators: dict[int, _Generator] = {}

    def take(self, group_id: int) -> int:
        """Counts the group as taken; returns how many groups of its generator with a higher number were taken before.

        A group that is taken again, because it was made once more after a rollback, counts once.
        """
        apart = self._num_generators
        seen = self._generators.setdefault(group_id % apart, _Generator(first=group_id, last=group_id))
        seen.missing |= {*range(seen.last + apart, group_id, apart), *range(group_id + apart, seen.first, apart)}
        seen.missing.discard(group_id)
        seen.first, seen.last = min(seen.first, group_id), max(seen.last, group_id)
        return (seen.last - group_id) // apart - sum(number > group_id for number in seen.missing)
