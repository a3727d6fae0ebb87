"""How the policy is trained."""

from typing import Annotated, Any, ClassVar, Literal, get_args

from pydantic import AfterValidator, Field, ValidationInfo, field_validator

from configs.generation import Precision
from configs.losses import AipoConfig, KlConfig, LossConfig, MasksConfig
from configs.section import Count, NonNegative, Parameters, Positive, Replicas, Section, Text, one_of_or_path

Share = Annotated[float, Field(ge=0, le=1)]
Momentum = Annotated[float, Field(ge=0, lt=1)]
AdvantageName = Literal[
    "group_mean", "leave_one_out", "grpo", "reinforce_plus_plus", "reinforce_plus_plus_baseline", "maxrl"
]


class ParallelConfig(Section):
    """Number of processes that train together, each on its own device: `data` times `tensor`."""

    data: Annotated[int, Field(ge=1, le=1024)] = 1
    """Number of ranks that split the batch, and by default the weights and the optimizer state (FSDP2)."""
    shard: Count | None = None
    """Number of neighbouring data ranks that split the weights and the optimizer state, such as those of one host; each
    such group holds the whole model, and gradients are summed over the groups (HSDP). Must divide `data`; null: all
    data ranks. Where hosts are missing and it divides no longer, all that are left."""
    tensor: Annotated[int, Field(ge=1, le=64)] = 1
    """Number of ranks that split each layer's heads and features; must divide the model's number of attention heads."""


class LoraConfig(Section):
    """Low-rank adapters that are trained instead of the weights (arXiv 2106.09685)."""

    alpha: ClassVar[float] = 16.0
    """Adapter outputs are scaled by alpha / rank, no unit."""
    rank: Count | None = None
    """Inner dimension of the adapters, whose outputs are scaled by 16 / `rank`; null: no adapters, all weights are
    trained. Generators get the adapter of each version, with `weights.transport: direct` the merged weights. At most
    512 with `generation.engine: vllm`."""
    target_modules: Annotated[list[Text], Field(min_length=1)] = Field(
        default_factory=lambda: ["q_proj", "k_proj", "v_proj", "o_proj"]
    )
    """Names of the linear layers with an adapter."""


class ScheduleConfig(Parameters):
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


class AdamWConfig(Parameters):
    """AdamW (arXiv 1711.05101); its weight decay is `training.weight_decay`."""

    beta1: Momentum = 0.9
    """Share of the gradient's running mean that a step keeps, no unit."""
    beta2: Momentum = 0.999
    """Share of the squared gradient's running mean that a step keeps, no unit; 0.95 to 0.99 follows changes faster."""
    epsilon: Positive = 1e-8
    """Added to the square root of that mean, in the gradient's unit, so that a weight without gradient stays."""


class SelectionConfig(Section):
    """Which groups and tokens a step trains, and how much they weigh."""

    drop_zero_advantage: bool = False
    """Whether a group whose rewards are all equal is dropped, and another one is generated in its place (dynamic
    sampling of DAPO, arXiv 2503.14476, §3.2). Not for the advantage `reinforce_plus_plus`, where such a group
    teaches."""
    truncated: Literal["train", "mask"] = "train"
    """What happens to a response that was cut off, at `generation.max_new_tokens` or by the limit of turns. `train`:
    it is trained like any other; `mask`: it has no loss, and its reward counts in the group's baseline."""
    overlong_buffer: Count | None = None
    """Length of a linear penalty ramp before `generation.max_new_tokens`, tokens: the reward that advantages are made
    of falls by up to 1 (DAPO, arXiv 2503.14476, §3.4). Stored rewards stay as they are; null: no penalty."""
    source_factors: dict[str, NonNegative] = Field(default_factory=dict)
    """Factor of the advantages, and with them of the loss, by the task that the prompt is from, such as
    `{chain_sum: 0.5}`; 1 for the others. Only for prompts from `reasoning_gym`."""


class TeacherConfig(Section):
    """A model that the policy is trained towards."""

    path: Text
    """Folder of a Hugging Face causal language model with the policy's tokenizer, or its ORG/NAME on a hub; path or URL
    of a stored run, whose promoted checkpoint then teaches; or `start`: the policy before its first update."""
    replicas: Replicas = 1
    """Number of processes that compute its log-probabilities."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of each of them; with `cuda` each has its own GPU."""
    threads: Count = 1
    """CPU threads of each of them."""


class DistillationConfig(Section):
    """On-policy distillation: each token's advantage is `reward_coefficient` times that of its response, plus
    `coefficient` times log π_T − log π, whose mean over the policy's samples descends KL(π‖π_T). With `top_k`,
    `forward_coefficient` times KL(π_T‖π) is added to the loss (docs/teachers.md)."""

    teacher: Text | None = None
    """Name of one of `teachers`; null: none."""
    coefficient: NonNegative = 1.0
    """Factor of log π_T − log π, per nat; 0 only with `top_k`."""
    reward_coefficient: NonNegative = 1.0
    """Factor of the advantage by rewards where there is a teacher; 0: the teacher alone counts."""
    top_k: Count | None = None
    """Number of the teacher's likeliest tokens that are stored with each response token, 8 bytes each, for the forward
    KL; usually 16 to 128; null: none, and no forward KL."""
    forward_coefficient: Positive = 1.0
    """Factor of the forward KL, per nat; only with `top_k`."""


class ObjectiveConfig(Section):
    """Target of a response's tokens; a source of a mixture may have its own."""

    loss: LossConfig = Field(default_factory=AipoConfig)
    """Policy-gradient loss, by name or as `{name: ppo_clip, clip_high: 0.28}`. It weights a token: `aipo` with its
    importance ratio π/μ, clipped from above; `reinforce` with 1; `ppo_clip` with the ratio while that is within bounds.
    `cross_entropy` needs no advantage: it learns demonstrations. docs/losses.md lists all losses and their parameters.
    Or your own, as `package.module:function`."""
    masks: MasksConfig = Field(default_factory=MasksConfig)
    aggregation: Literal["token_mean", "sequence_mean", "prompt_mean", "constant"] = "token_mean"
    """How token losses are summed: `token_mean`: mean over all tokens of the batch; `sequence_mean`: mean over each
    response's tokens, then over responses; `prompt_mean`: mean over the tokens of each group, then over groups;
    `constant`: sum over all tokens, divided by the number of responses times `generation.max_new_tokens`."""
    advantage: Annotated[str, AfterValidator(one_of_or_path(get_args(AdvantageName)))] = "group_mean"
    """How a response's advantage is computed from its reward. `group_mean`: minus the group's mean; `leave_one_out`:
    minus the mean of the group's other responses; `grpo`: minus the group's mean, over the group's standard deviation;
    `reinforce_plus_plus`: minus the batch's mean, over the batch's standard deviation; `reinforce_plus_plus_baseline`:
    minus the group's mean, over the batch's standard deviation; `maxrl`: minus the group's mean, over that mean. Or
    your own, as `package.module:function`."""
    kl: KlConfig = Field(default_factory=KlConfig)
    distillation: DistillationConfig = Field(default_factory=DistillationConfig)
    entropy_coefficient: NonNegative = 0.0
    """Factor of the entropy of the policy's next token that is subtracted from each token's loss, per nat; keeps the
    policy from becoming certain too early (arXiv 1602.01783); 0: none, usually at most 0.01."""


class TrainingConfig(ObjectiveConfig):
    """How the policy is trained."""

    non_finite: Literal["refuse", "mask"] = "refuse"
    """What happens if the loss of a token is not a finite number. `refuse`: the run ends with a sentence and the policy
    stays; `mask`: the token has no loss and is counted in `non_finite_tokens`."""
    selection: SelectionConfig = Field(default_factory=SelectionConfig)
    max_steps: Count
    """Steps of the whole run; step k makes policy version k."""
    groups_per_step: Count = 64
    """Groups per step, its batch; a multiple of `generation.replicas`."""
    minibatches: Count = 1
    """Parts of a batch, by whole groups, with an optimizer update each; must divide `groups_per_step`. The order of the
    groups follows from `seed` and the policy version."""
    epochs: Count = 1
    """How often a step goes through its batch, with `minibatches` updates each time."""
    learning_rate: Positive = 2e-4
    """AdamW learning rate; the full one where `schedule` changes it."""
    schedule: ScheduleConfig = Field(default_factory=ScheduleConfig)
    adamw: AdamWConfig = Field(default_factory=AdamWConfig)
    weight_decay: NonNegative = 0.0
    """AdamW decoupled weight decay, as a multiple of the learning rate."""
    max_grad_norm: Positive = 1.0
    """Maximum L2 norm of the gradient; a larger gradient is scaled down to it."""
    max_tokens_per_microbatch: Count = 16384
    """Maximum tokens of one forward and backward pass, prompts included; a longer trajectory gets its own pass."""
    share_prefixes: bool = True
    """Whether what several trajectories begin with, as the prompt of a group, is computed once for all of them (arXiv
    2506.05433). It changes results by rounding alone, and is done only where it saves a tenth of the tokens."""
    device: Literal["cpu", "cuda"] = "cpu"
    """Device of the trainer's ranks; with `cuda` each has its own GPU."""
    parallel: ParallelConfig = Field(default_factory=ParallelConfig)
    compute_dtype: Annotated[Precision | None, Field(validate_default=True)] = None
    """Number format of forward and backward passes; null: bfloat16 with `device: cuda`, otherwise `model.dtype`;
    `auto`: as in `generation.dtype`. Trained weights, gradients between ranks and optimizer state are in float32, and
    so are logits on GPUs."""
    compile: Annotated[bool | None, Field(validate_default=True)] = None
    """Whether torch compiles each decoder layer, and the work on each logit, into fewer operations. It takes a minute,
    if possible while the generators start. Without a compiler (C for `cuda`, C++ for `cpu`) training
    continues uncompiled, and an incident says so. null: with `device: cuda`."""
    activation_checkpointing: Literal[False, True, "selective"] = False
    """Which activations of each layer the backward pass recomputes instead of keeping them in memory. `true`: all;
    `selective`: those that take little time, keeping results of matrix products and attention."""
    optimizer_offload: bool = False
    """Whether AdamW's moments stay in the host's memory and are copied to the device only for the update, parameter by
    parameter: 8 bytes per trained parameter less on the device, 16 more per step over its link to the host."""
    frozen_layers: Annotated[int, Field(ge=0)] = 0
    """Number of decoder layers, counted from the first, that are not trained, and with them the embeddings; they take
    no memory for gradients, moments and activations. 0: everything is trained."""
    lora: LoraConfig = Field(default_factory=LoraConfig)
    router_replay: bool = False
    """Whether tokens are routed to the experts that the generator chose, which are then stored with each trajectory
    (arXiv 2510.11370). Only for mixtures of experts, and for `generation.engine: transformers`."""
    router_aux_loss_coefficient: NonNegative = 0.0
    """Factor of a loss that keeps the use of experts in balance in each trajectory (arXiv 2101.03961); 0: none. Only
    for mixtures of experts."""
    on_collapse: Literal["go_on", "stop", "roll_back"] = "go_on"
    """What follows when training collapses (docs/control.md), which is reported in any case. `stop`: training ends;
    `roll_back`: it resumes from the last good checkpoint with the learning rate cut to a third or less, and never above
    the rate of that checkpoint."""
    checkpoint_minutes: ClassVar[float] = 10.0
    """Maximum time between two checkpoints, minutes."""
    checkpoint_every: Count = 10
    """Number of optimizer steps between two checkpoints; there are more where steps take long, so that at most ten
    minutes of work are lost."""
    checkpoint_keep: Annotated[int, Field(ge=2)] | None = None
    """Number of newest checkpoints whose files stay; those of the best version evaluated stay as well. null: all."""
    threads: Count | None = None
    """CPU threads of each of the trainer's ranks. null: chosen at the start of each attempt. On CPUs trainer and
    generators divide the host's cores by their busy time in the attempt before, at first in halves; where they take
    turns, as in sync mode, each has all. For a model of fewer than 20 million parameters, and on GPUs, it is one."""

    @property
    def num_threads(self) -> int:
        """`threads`; 1 while none are chosen."""
        return self.threads or 1

    @field_validator("compute_dtype", "compile")
    @classmethod
    def _follows_the_device(cls, value: Any, info: ValidationInfo) -> Any:
        if value is not None or info.data.get("device") != "cuda":
            return value
        return "bfloat16" if info.field_name == "compute_dtype" else True

    def with_loss(self, name: str) -> "TrainingConfig":
        """The same with the loss `name`: as configured if that is the loss already, otherwise with its defaults."""
        if name == self.loss.name:
            return self
        return TrainingConfig.model_validate(self.model_dump() | {"loss": name})

    @property
    def pulls_without_advantage(self) -> bool:
        """Whether rollouts without an advantage by rewards add to the gradient: by KL, entropy, a teacher, the experts'
        balance, cross-entropy or a custom loss."""
        coefficients = (self.kl.coefficient, self.entropy_coefficient, self.router_aux_loss_coefficient)
        if any(coefficients) or self.distillation.teacher is not None:
            return True
        return self.loss.name == "cross_entropy" or ":" in self.loss.name
