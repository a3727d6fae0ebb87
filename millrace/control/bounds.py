"""The staleness bound in force at each policy version.

    version      0  1  2  3  4  5  6  7  8           bound 1 at first, raised to 4 at version 2,
    bound b      1  1  4  4  3  2  1  1  1           lowered to 1 at version 4
    v + b(v)     1  2  6  7  7  7  7  8  9           tokens of version v may be trained by a trainer up to this version

A token of version v may be trained while the trainer's version is at most v + b(v): the bound of a token is the one
that was in force when it could be sampled. A generator that holds version v admits groups by b(v), so the argument in
`millrace.rollouts.staleness` holds for each version alone. A bound falls by at most one per version. So v + b(v) never
falls: nothing that was admitted becomes too old because the bound fell, and while it falls nothing is admitted.
"""

from collections.abc import Sequence


class Bounds:
    """Bounds by version. `changes` are (version, bound) pairs in order: each bound holds from its version on."""

    def __init__(self, changes: Sequence[Sequence[int]]) -> None:
        self._changes = [(int(version), int(bound)) for version, bound in changes]

    def in_force(self, version: int) -> int:
        """The bound at a version, policy versions."""
        return next((bound for since, bound in reversed(self._changes) if since <= version), self._changes[0][1])

    def move(self, version: int, target: int) -> int:
        """Decides the bound of `version`, the newest so far, on the way to `target`; returns it."""
        last = self.in_force(version - 1) if version > 0 else target
        bound = max(target, last - 1)
        if bound != self._changes[-1][1]:
            self._changes.append((version, bound))
        return bound

    def oldest_trainable(self, trainer_version: int) -> int:
        """The oldest version whose tokens may carry loss when a trainer at `trainer_version` takes their group."""
        version = trainer_version
        while version > 0 and version - 1 + self.in_force(version - 1) >= trainer_version:
            version -= 1
        return version

    def forget(self, trainer_version: int) -> None:
        """Forgets the changes that no trainer at this version or a later one needs."""
        # The version before the oldest is the one that tells where the trainable ones begin.
        first = max(0, self.oldest_trainable(trainer_version) - 1)
        self._changes = [(first, self.in_force(first)), *(one for one in self._changes if one[0] > first)]

    def to_json(self) -> list[list[int]]:
        """The changes, as JSON for a checkpoint."""
        return [[version, bound] for version, bound in self._changes]
