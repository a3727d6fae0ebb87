"""How the policy learns."""

from typing import Annotated, Literal

from pydantic import Field

from configs.losses import KlConfig, LossesConfig
from configs.section import Count, NonNegative, Positive, Section, Text

LossName = Literal[
    "aipo",
    "reinforce",
    "ppo_clip",
    "decoupled_ppo",
    "tis",
    "icepop",
    "sequence_mask",
    "geometric_mask",
    "cispo",
    "gspo",
    "sapo",
    "dppo_tv",
    "topr",
]
AdvantageName = Literal[
    "group_mean", "leave_one_out", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "maxrl"
]


class ParallelConfig(Section):
    """How many processes, each with a device of its own, train together: `data` times `tensor`."""

    data: Annotated[int, Field(ge=1, le=1024)] = 1
    """Ranks that each train a share of the batch and hold a share of weights and optimizer (FSDP2)."""
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Ranks that each layer's heads and features are divided among; divides the model's attention heads."""


class LoraConfig(Section):
    """Low-rank adapters that are trained in place of the weights they stand beside (arXiv 2106.09685)."""

    rank: Count | None = None
    """Inner dimension of an adapter; null: there are none, and every weight is trained."""
    alpha: Positive = 16.0
    """An adapter's product is scaled by alpha / rank."""
    target_modules: Annotated[list[Text], Field(min_length=1)] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    """Names of the linear layers that get one."""


class TrainingConfig(Section):
    """How the policy learns."""

    loss: LossName = "aipo"
    """Policy-gradient loss, by how it weighs a token: `aipo` by its importance ratio π/μ, clipped from above;
    `reinforce` by 1; `ppo_clip` by the ratio, until it has moved far enough; docs/losses.md has all."""
    max_importance_ratio: Annotated[float, Field(ge=1)] = 4.0
    """Upper clip ρ of a token's importance ratio π/μ under `aipo`, no unit; 2 to 10 is usual."""
    clip_low: Annotated[float, Field(gt=0, le=1)] = 0.2
    """`ppo_clip` and `decoupled_ppo` let go of a token with a negative advantage once its ratio is below 1 less this,
    no unit."""
    clip_high: Positive = 0.2
    """`ppo_clip` and `decoupled_ppo` let go of a token with a positive advantage once its ratio is above 1 plus this;
    `cispo` weighs no token more than that; no unit."""
    losses: LossesConfig = Field(default_factory=LossesConfig)
    """Parameters that one loss alone has."""
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = "token_mean"
    """How the tokens' losses become the batch's: `token_mean`, the mean over all its tokens; `sequence_mean`, over its
    responses, each the mean over its tokens; `constant`, the sum over all tokens, divided by responses times
    `generation.max_new_tokens`."""
    advantage: AdvantageName = "group_mean"
    """How much better a response did than others: `group_mean`, its reward less its group's mean; `leave_one_out`, less
    its siblings' mean; `grpo`, in the group's standard deviations; `reinforce_plus_plus`, less the batch's mean in the
    batch's standard deviations; `reinforce_plus_plus_baseline`, less the group's mean in the batch's standard
    deviations; `maxrl`, less the group's mean in group means."""
    kl: KlConfig = Field(default_factory=KlConfig)
    """Penalty for leaving the reference policy."""
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
    """Most tokens of one forward and backward pass, prompts included; a longer trajectory has one of its own."""
    device: Literal["cpu", "cuda"] = "cpu"
    """What the trainer's ranks compute on; with `cuda` each has a GPU of its own."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    """Over how many ranks the trainer is spread."""
    compute_dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of forward and backward passes; null: that of `model.dtype`. Weights, gradients between ranks and
    optimizer stay in `model.dtype`."""
    activation_checkpointing: bool = False
    """Whether each layer's activations are computed again in the backward pass instead of kept."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    """Adapters to train in place of the weights."""
    checkpoint_every: Count = 10
    """Optimizer steps between two checkpoints."""
    threads: Count = 1
    """CPU threads of the trainer."""
