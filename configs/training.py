"""How the policy learns."""

from typing import Annotated, Literal

from pydantic import Field

from configs.section import Count, NonNegative, Positive, Section

LossName = Literal["aipo", "reinforce", "ppo_clip", "cispo"]


class TrainingConfig(Section):
    """How the policy learns."""

    loss: LossName = "aipo"
    """Policy-gradient loss, by how it weighs a token: `aipo` by its importance ratio π/μ, clipped from above;
    `reinforce` by 1; `ppo_clip` by the ratio, until it has moved far enough; `cispo` as `aipo`, with `clip_high`."""
    max_importance_ratio: Annotated[float, Field(ge=1)] = 4.0
    """Upper clip ρ of a token's importance ratio π/μ under `aipo`, no unit; 2 to 10 is usual."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`ppo_clip` lets go of a token with a negative advantage once its ratio is below 1 less this, no unit."""
    clip_high: Positive = 0.2
    """`ppo_clip` lets go of a token with a positive advantage once its ratio is above 1 plus this; `cispo` weighs no
    token more than that; no unit."""
    max_steps: Count
    """Optimizer steps of the whole run; step k yields policy version k."""
    groups_per_step: Count = 64
    """Groups that each optimizer step consumes; a multiple of `generation.replicas`."""
    learning_rate: Positive = 2e-4
    """AdamW learning rate, per optimizer step."""
    weight_decay: NonNegative = 0.0
    """AdamW decoupled weight decay, as a multiple of the learning rate."""
    max_grad_norm: Positive = 1.0
    """The gradient is scaled down to this L2 norm when it is longer."""
    max_tokens_per_microbatch: Count = 16384
    """Most tokens, padding included, of one forward and backward pass."""
    checkpoint_every: Count = 10
    """Optimizer steps between two checkpoints."""
    threads: Count = 1
    """CPU threads of the trainer."""
