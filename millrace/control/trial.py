"""A change of the bound, until it has shown what it gains."""

from dataclasses import dataclass

from millrace.control.measured import CUT, Means

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
    length_ratio: float
    waiting: float
    """Seconds per step that the trainer waited."""
    expected: float
    """Gain, as a share; 0 for a raise that was made for the length of responses."""

    def failed(self, found: Means, bound: int) -> str | None:
        """Why the change to `bound`, under which this was found, did not serve; None if it did, or nobody can tell."""
        if not self.expected:
            won, lacked = found.length_ratio - self.length_ratio, 1 - self.length_ratio
            if found.length_ratio >= CUT or won >= _SERVED * lacked:
                return None
            return (
                f"trained responses had {self.length_ratio:.3f} of the length taken under the bound of before, and "
                f"have {found.length_ratio:.3f} under this one"
            )
        if found.gain >= self.gain * (1 + min(_PLENTY, _SERVED * self.expected)):
            return None
        if bound > self.before and found.trainer_waits * found.seconds_per_step > _OTHERWISE * self.waiting:
            # No raise makes the trainer wait longer: something else has changed meanwhile.
            return None
        return (
            f"the bound of before gave {self.gain:.3g} steps per second, counted by their effective sample size, and "
            f"this one {found.gain:.3g}"
        )
