"""What a plan predicted of a run."""

from typing import Annotated

from pydantic import Field

from configs.section import NonNegative, Positive, Section


class PlanConfig(Section):
    """What `millrace plan` predicted of a run with this config. `millrace status` compares it with what was measured;
    nothing else depends on it."""

    step_seconds: Positive | None = None
    """Seconds per optimizer step; null: not predicted."""
    tokens_per_second: Positive | None = None
    """Response tokens trained per second; null: not predicted."""
    staleness_mean: NonNegative | None = None
    """Mean staleness of the trajectories trained, policy versions; null: not predicted."""
    dropped_share: Annotated[float, Field(ge=0, le=1)] | None = None
    """Fraction of the trajectories that the trainer takes and drops; null: not predicted."""
