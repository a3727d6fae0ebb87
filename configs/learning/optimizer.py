"""How the optimizer moves the weights: the learning rate of each step, and AdamW's own parameters."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Count, Positive, Section

Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]


class ScheduleConfig(Section):
    """The learning rate of each step, as a share of `training.learning_rate`. It depends on the policy version alone,
    so that it is the same after a resume and in a replay."""

    decay: Literal["constant", "linear", "cosine"] = "constant"
    """How the rate falls after the warm-up: `constant`: not at all; `linear`: by the same amount each step; `cosine`:
    along half a cosine (arXiv 1608.03983)."""
    warmup_steps: Annotated[int, Field(ge=0)] = 0
    """Steps at the start of the run whose rate is below the full one; it grows by the same amount each step."""
    steps: Count | None = None
    """Steps that warm-up and decay take together; all later steps have the final rate. `linear` and `cosine` need it.
    It is not `training.max_steps`, because a resumed run may raise that, and the rates of past steps must stay."""
    final_share: Share = 0.1
    """Rate after the decay, as a share of the full rate, no unit; 0.1 is usual."""
    ess_scaling: bool = False
    """Whether the rate is multiplied by the square root of the effective sample size of the importance ratios π/μ, as
    a share of the tokens (VCPO, arXiv 2602.17616): stale trajectories then make smaller steps. Always with
    `staleness.control: adaptive`."""


class AdamWConfig(Section):
    """AdamW (arXiv 1711.05101); its weight decay is `training.weight_decay`."""

    beta1: Momentum = 0.9
    """Share of the gradient's running mean that a step keeps, no unit."""
    beta2: Momentum = 0.999
    """Share of the squared gradient's running mean that a step keeps, no unit; 0.95 to 0.99 follows changes faster."""
    epsilon: Positive = 1e-8
    """Added to the square root of that mean, in the gradient's unit, so that a weight without gradient stays."""
