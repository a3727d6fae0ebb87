"""The learning rate that made each of the newest policy versions: schedule and rollbacks included, √ESS not."""

from collections.abc import Sequence
from math import isclose


class Rates:
    """Rates by version. `changes` are (version, rate) pairs in order: each rate holds from its version on."""

    def __init__(self, changes: Sequence[Sequence[float]] = ()) -> None:
        self._changes = [(int(version), float(rate)) for version, rate in changes]

    def note(self, version: int, rate: float) -> None:
        """`rate` made `version`, the newest so far."""
        # A factor that undoes a change of the rate leaves a difference in the last bit.
        if not self._changes or not isclose(rate, self._changes[-1][1]):
            self._changes.append((version, rate))

    def of(self, version: int) -> float:
        """The rate that made `version`; of one before all that are known, the first rate known."""
        return next((rate for since, rate in reversed(self._changes) if since <= version), self._changes[0][1])

    def highest(self) -> float:
        """The highest rate since the versions that were forgotten; 0 if none is known."""
        return max((rate for _, rate in self._changes), default=0.0)

    def forget(self, version: int) -> None:
        """Forgets what made the versions before this one."""
        self._changes = [(version, self.of(version)), *(one for one in self._changes if one[0] > version)]

    def to_json(self) -> list[list[float]]:
        """The changes, as JSON for a checkpoint."""
        return [[version, rate] for version, rate in self._changes]
