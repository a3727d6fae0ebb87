"""What steps measured, and its means over the steps since the decision before."""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one step measured. Seconds are sums since the trainer started."""

    effective_sample_size: float
    """Of the ratios π/μ, before any clipping, as a share of its value on policy."""
    length_ratio: float
    """Mean length of what the step trained ÷ of what was taken for it."""
    steps_ready: float
    """Scored groups that the step left behind, in steps' worth."""
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
    """The fewest that any of its steps left behind: what lay ready all the time."""
    trainer_waits: float
    """Share of its time."""
    generators_wait: float
    """Share of their time, for room or weights."""
    seconds_per_step: float

    @property
    def gain(self) -> float:
        """Steps per second, each counted as the share of it that teaches."""
        return self.effective_sample_size * min(1.0, self.length_ratio) / self.seconds_per_step

    @property
    def both_wait(self) -> float:
        """The share of a step's time that more groups on their way could save."""
        return min(self.trainer_waits, self.generators_wait)


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
