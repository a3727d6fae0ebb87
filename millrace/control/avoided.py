"""Values that did not serve, and for how long they are left alone."""

from dataclasses import dataclass

_PATIENCE, _MOST_PATIENCE = 32, 1024
"""Steps until a value that did not serve is tried again: the first time, and at most."""
_MUCH_MORE = 2.0
"""Times as much to win, and a value is tried again at once: what it failed at was something else."""


@dataclass(kw_only=True)
class Avoided:
    """A value that did not serve: neither it nor any above it is tried until some version.

    Values that are avoided downwards are noted and asked for as negative numbers.
    """

    value: int | None = None
    until: int = 0
    patience: int = _PATIENCE
    hoped: float = 1.0
    """What it was to win, as a share."""

    def note(self, value: int, version: int, *, hoped: float = 1.0) -> None:
        """It did not serve. If it was avoided so far and tried once more, it is left alone twice as long."""
        if version >= self.until:
            again = self.value is not None and value >= self.value
            self.patience = min(_MOST_PATIENCE, 2 * self.patience) if again else _PATIENCE
        self.value, self.until, self.hoped = value, version + self.patience, hoped

    def forbids(self, value: int, version: int, hoped: float = 0.0) -> bool:
        """Whether `value` is left alone at this version, though `hoped` is there to win."""
        if self.value is None or value < self.value or version >= self.until:
            return False
        return hoped <= _MUCH_MORE * self.hoped
