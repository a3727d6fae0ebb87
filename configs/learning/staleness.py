"""How old a trajectory may be when it is trained on, and who decides."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Section

Versions = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(gt=0, lt=1)]


class StalenessConfig(Section):
    """Maximum age of a trajectory when it is trained on."""

    max_staleness: Versions = 4
    """Maximum policy versions by which the trainer is ahead of the oldest one in a trajectory; 0 in `sync` mode."""
    too_old: Literal["drop", "wait", "mask"] = "mask"
    """What happens to a group with tokens older than that. `drop`: the whole group is dropped; `wait`: no step
    is made that would leave a group in flight too old; `mask`: these tokens carry no loss, and the rest of the group is
    trained on. No effect in `sync` mode."""
    control: Literal["fixed", "adaptive"] = "fixed"
    """`fixed`: the bound is `max_staleness`. `adaptive`: the trainer moves the bound between `min_staleness` and
    `max_staleness`, and the generators' places, by what it measures (docs/control.md)."""
    min_staleness: Versions = 1
    """Lowest bound with `adaptive` control. It starts from the lowest one at which all places can be filled."""
    ess_target: Share = 0.95
    """With `adaptive` control the bound falls while the effective sample size of the ratios π/μ, as a share of what it
    is on policy, is below this."""
    ess_floor: Share = 0.5
    """With `adaptive` control the bound falls to `min_staleness` if that share is below this in three steps in a row.
    No group is admitted on the way there."""
