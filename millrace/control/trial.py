"""A change of the bound, until it has shown what it gains."""

from dataclasses import dataclass, fields
from typing import Any

from millrace.control.measured import Means

_SERVED, _PLENTY = 0.25, 0.05
"""Share of the expected gain that a change has to bring; and the gain that is enough in any case."""
_OTHERWISE = 1.25
"""Times as long as the trainer waited before a raise, and the raise is not what made the difference."""


@dataclass(kw_only=True)
class Trial:
    """What was before the change, and what is expected of it."""

    before: int
    """The bound before it."""
    gain: float
    """As in `Means`, before it."""
    waiting: float
    """Seconds per step that the trainer waited."""
    expected: float
    """Gain, as a share."""

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> "Trial":
        """Of what a checkpoint holds; those of earlier versions hold more."""
        return cls(**{one.name: values[one.name] for one in fields(cls)})

    def failed(self, found: Means, bound: int) -> str | None:
        """Why the change to `bound`, under which this was found, did not serve; None if it did, or nobody can tell."""
        if found.gain >= self.gain * (1 + min(_PLENTY, _SERVED * self.expected)):
            return None
        if bound > self.before and found.trainer_waits * found.seconds_per_step > _OTHERWISE * self.waiting:
            # No raise makes the trainer wait longer: something else has changed meanwhile.
            return None
        return (
            f"the bound of before gave {self.gain:.3g} steps per second, counted by their effective sample size, and "
            f"this one {found.gain:.3g}"
        )
