"""When a checkpoint is due: by versions, and by time where steps are long."""

_FIRST_SHARE = 0.1
"""Of the usual time: a run that has no checkpoint yet loses everything with its trainer."""


class CheckpointSchedule:
    """Due at each version that `every` divides, and `minutes` after the last checkpoint (None: not by time).

    A run that does not have one yet gets it after a tenth of that time. `now` is in seconds of any clock.
    """

    def __init__(self, every: int, minutes: float | None, *, has_one: bool, now: float) -> None:
        self._every = every
        self._minutes = minutes
        self._has_one = has_one
        self._t_last = now

    def is_due(self, version: int, now: float) -> bool:
        """Whether version `version`, which was just made, is to be saved."""
        if version % self._every == 0:
            return True
        if self._minutes is None:
            return False
        share = 1.0 if self._has_one else _FIRST_SHARE
        return now - self._t_last >= 60 * self._minutes * share

    def saved(self, now: float) -> None:
        """A checkpoint has begun."""
        self._has_one, self._t_last = True, now
