"""What steps measured, and its means over the steps since the decision before."""

from collections.abc import Sequence
from dataclasses import dataclass

NEVER_WAITS, MOST_WAITS = 0.01, 0.95
"""Shares of waiting: below the first there is none, and above the second it tells no more than that it is too much."""


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one step measured. Seconds are sums since the trainer started."""

    effective_sample_size: float
    """Of the ratios π/μ, before any clipping, as a share of its value on policy."""
    length_ratio: float
    """Mean length of what the step trained ÷ of what was taken for it."""
    steps_ready: float
    """Scored groups that lie ready when the step is done, in steps' worth."""
    trainer_waited: float
    trainer_seconds: float
    generators_waited: float
    """Summed over all generators."""
    generators_seconds: float


@dataclass(frozen=True, kw_only=True)
class Means:
    """Over the steps of a window."""

    effective_sample_size: float
    length_ratio: float
    steps_ready: float
    """The fewest of any step."""
    trainer_waits: float
    """Share of its time."""
    generators_wait: float
    """Share of their time, for room or weights."""
    seconds_per_step: float

    @property
    def gain(self) -> float:
        """Steps per second, each counted as the share of it that teaches."""
        return self.effective_sample_size * (1 - self.lost) / self.seconds_per_step

    @property
    def lost(self) -> float:
        """Share of the tokens that were too old to be trained."""
        return max(0.0, 1 - self.length_ratio)

    def steps_needed(self, bound: int) -> float:
        """How many steps have to be on their way for trainer and generators to be as busy as they can be."""
        both_wait = min(self.trainer_waits, self.generators_wait, MOST_WAITS)
        if both_wait > NEVER_WAITS:
            return (bound + 1) / (1 - both_wait)
        # The groups of the next step have to lie ready, or the trainer would wait for them.
        return bound + 1 - max(0.0, self.steps_ready - 1)

    def expected_ess(self, other: int, bound: int) -> float:
        """Under another bound than the one that these are of: χ² grows with the square of the distance of policies."""
        chi_square = 1 / max(self.effective_sample_size, 1e-9) - 1
        return 1 / (1 + chi_square * (other / max(1, bound)) ** 2)

    def expected_lost(self, other: int, bound: int) -> float:
        """Under another bound: of a long tail, what takes longer falls with the time that it may take."""
        return min(1.0, self.lost * (bound + 1) / (other + 1))

    def expected_gain(self, other: int, bound: int, needed: float) -> float:
        """As `gain`, in other units; `needed` is that of `steps_needed`."""
        teaches = self.expected_ess(other, bound) * (1 - self.expected_lost(other, bound))
        return teaches / max(1.0, needed / (other + 1))


def means(before: Reading, readings: Sequence[Reading]) -> Means:
    """Of the steps after `before`, one reading each."""
    last, count = readings[-1], len(readings)
    waited, seconds, idle, generating = (
        getattr(last, name) - getattr(before, name)
        for name in ("trainer_waited", "trainer_seconds", "generators_waited", "generators_seconds")
    )
    return Means(
        effective_sample_size=sum(one.effective_sample_size for one in readings) / count,
        length_ratio=sum(one.length_ratio for one in readings) / count,
        steps_ready=min(one.steps_ready for one in readings),
        trainer_waits=waited / seconds if seconds > 0 else 0.0,
        generators_wait=idle / generating if generating > 0 else 0.0,
        seconds_per_step=seconds / count,
    )
