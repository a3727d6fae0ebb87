"""How old a trajectory may be when it is trained on, and who decides."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from configs.section import Section

if TYPE_CHECKING:
    from configs.schema import RunConfig

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


def impossible_control(config: RunConfig) -> Iterator[str]:
    """Yield one sentence for each setting in `config` that `staleness.control` can't be combined with."""
    staleness = config.staleness
    if staleness.ess_floor >= staleness.ess_target:
        yield (
            f"staleness.ess_floor is {staleness.ess_floor:g} and staleness.ess_target is {staleness.ess_target:g}; "
            "expected ess_floor to be less than ess_target"
        )
    if staleness.control != "adaptive":
        return
    if config.pipeline.mode == "sync":
        yield (
            "staleness.control is adaptive and pipeline.mode is sync, which has a bound of 0; expected control to be "
            "fixed"
        )
    if staleness.min_staleness > staleness.max_staleness:
        yield (
            f"staleness.min_staleness is {staleness.min_staleness} and staleness.max_staleness is "
            f"{staleness.max_staleness}; expected min_staleness to be at most max_staleness"
        )
    if config.training.loss == "reinforce":
        yield (
            "staleness.control is adaptive and training.loss is reinforce, which has no importance ratios and suffers "
            "from staleness that they don't bound; expected another loss, such as aipo"
        )
