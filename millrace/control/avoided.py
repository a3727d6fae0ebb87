"""Values that did not serve, and for how long they are left alone."""

from dataclasses import dataclass

_PATIENCE, _MOST_PATIENCE = 32, 1024
"""Steps until a value that did not serve is tried again: the first time, and at most."""
_MUCH_MORE = 2.0
"""Times as much to win, and a value is tried again at once: what it failed at was something else."""


@dataclass(kw_only=True)
class Avoided:
    """A bound, or a number of places, that did not serve; neither it nor any beyond it is tried until some version."""

    value: int | None = None
    until: int = 0
    patience: int = _PATIENCE
    hoped: float = 1.0
    """The share of a step's time, or of the length of responses, that it was to win."""

    def note(self, value: int, version: int, *, again: bool, hoped: float = 1.0) -> None:
        """`again`: whether it is among those avoided so far, and was tried once more."""
        if version >= self.until:
            self.patience = min(_MOST_PATIENCE, 2 * self.patience) if again else _PATIENCE
        self.value, self.until, self.hoped = value, version + self.patience, hoped

    def highest_allowed(self, wanted: int, version: int, hoped: float) -> int:
        """`wanted`, or the highest value below those avoided; `hoped` is what there is to win now."""
        if self.value is None or version >= self.until or hoped > _MUCH_MORE * self.hoped:
            return wanted
        return min(wanted, self.value - 1)

    def forbids_lowering_to(self, value: int, version: int) -> bool:
        """Whether `value` is one of those at which, and below which, too little was."""
        return self.value is not None and value <= self.value and version < self.until
