"""All settings of a run, typed: `RunConfig` and its sections.

    RunConfig ─┬─ name, seed
               ├─ pipeline     how stages are scheduled     ├─ staleness    maximum age of a trajectory
               ├─ model        the start weights            ├─ weights      how new weights are sent
               ├─ prompts      what the policy is asked     ├─ storage      where the run is stored
               ├─ generation   how responses are sampled    ├─ evaluation   how progress is measured
               ├─ scoring      how responses are rewarded   ├─ promotion    when a checkpoint is promoted
               ├─ training     how the policy is trained    ├─ supervision  when a stage counts as hung
               ├─ budget       limits of one attempt        ├─ environment  what answers between turns
               └─ placement    on which hosts stages run    └─ plan         what `millrace plan` predicted

Unknown keys, wrong types and non-finite numbers are refused. Nothing is converted, except a whole number where a real
one is expected. `configs.combinations` checks settings against each other.
"""

import re
from typing import Annotated, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from configs.combinations import impossible_combinations
from configs.engine_args import EngineArgs
from configs.errors import ConfigError
from configs.learning.staleness import StalenessConfig
from configs.operation.limits import BudgetConfig, SupervisionConfig
from configs.operation.placement import PlacementConfig
from configs.operation.plan import PlanConfig
from configs.precision import Precision
from configs.prompts import EnvironmentConfig, EvaluationConfig, PromptsConfig
from configs.scoring import ScoringConfig
from configs.section import Count, NonNegative, Positive, Replicas, Section, Text, ipv4_network, is_section
from configs.stored import staleness_bound
from configs.training import TrainingConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PipelineConfig(Section):
    """How stages are scheduled against each other."""

    mode: Literal["async", "sync"] = "async"
    """`async`: generators run ahead by up to `staleness.max_staleness`; `sync`: each step waits for its own
    rollouts."""


class BootstrapConfig(Section):
    """The tiny Llama model that a run creates if `model.path` is null. It is warm-started on the training prompts."""

    hidden_size: Count = 64
    """Width of the residual stream, features; an even multiple of `num_heads`."""
    num_layers: Count = 3
    """Number of transformer layers."""
    num_heads: Count = 4
    """Attention heads per layer."""
    intermediate_size: Count = 256
    """Width of each feed-forward block, features."""
    error_rate: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Fraction of arithmetic demonstrations with a wrong carry, and of the carries in a demonstrated chain of sums;
    demonstrations of other prompts are all right."""
    target_imitation_rate: Annotated[float, Field(gt=0, le=1)] = 0.95
    """The warm start ends once this fraction of greedy answers could be a demonstration."""
    max_accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The warm start goes on while more than this fraction of greedy answers is right, so that rewards have work
    left."""
    max_steps: Count = 2000
    """Maximum supervised optimizer steps of the warm start."""
    batch_size: Count = 128
    """Prompts per supervised step."""
    learning_rate: Positive = 2e-3
    """AdamW learning rate of the supervised steps."""
    threads: Count = 2
    """CPU threads of the warm start, which runs before all other stages."""


class ModelConfig(Section):
    """The policy before its first update (version 0)."""

    path: Text | None = None
    """Folder of a Hugging Face causal language model and its tokenizer, or its ORG/NAME on a hub; null: create one as
    `model.bootstrap` describes."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in every stage; `generation.dtype` overrides it for generators. The trainer computes
    in it, too, but keeps the weights that it trains in float32."""
    chat_template: Text | None = None
    """File with a chat template (Jinja) to use in place of the tokenizer's own; exported models get it too."""
    renderer: Text = "auto"
    """How conversations are written: `template`: by the tokenizer's chat template; a name of the library `renderers`,
    such as `qwen3`; `auto`: by the library where it writes the same tokens as the template, else by the template."""
    bootstrap: BootstrapConfig = Field(default_factory=BootstrapConfig)
    """The model to create if `model.path` is null."""


class GenerationConfig(Section):
    """How responses are sampled."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that samples the tokens; run `make vllm` once before using `vllm`."""
    engine_args: EngineArgs = Field(default_factory=dict)
    """vLLM engine arguments by vLLM's names, such as `tensor_parallel_size`, `quantization`, `max_model_len`; only with
    the engine `vllm`."""
    dtype: Precision | None = None
    """Number format of the weights in generators; null: `model.dtype`; `auto`: bfloat16 where the machine that starts
    the run multiplies it, else float32."""
    replicas: Replicas = 1
    """Number of generator processes."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Responses per prompt; advantages compare them with each other."""
    groups_per_batch: Count = 16
    """Places of a generator, in groups: it keeps groups_per_batch * group_size responses in flight. In `sync` mode all
    groups of a step are sampled together."""
    temperature: Positive = 1.0
    """The logits are divided by this before sampling, no unit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Nucleus sampling: the likeliest tokens with this probability mass are sampled from; 1 keeps the whole vocabulary.
    The trainer renormalises its policy over the tokens that were kept, which are stored with each response: 4 bytes for
    each of them."""
    top_k: Count | None = None
    """At most this many of the likeliest tokens are sampled from, before `top_p` is applied to them; null: no limit. It
    bounds what is stored of the kept tokens."""
    max_new_tokens: Count = 16
    """Maximum length of a response, tokens, end-of-sequence token included."""
    threads: Count = 1
    """CPU threads per generator."""


class WeightsConfig(Section):
    """How new policy versions are sent to the generators."""

    transport: Literal["shm", "direct", "store"] = "shm"
    """`shm`: shared memory on one host; `direct`: shards from trainer ranks to generators, on one host or several;
    `store`: files in the run's storage, for hosts any distance apart."""
    host: Text = "127.0.0.1"
    """Address on which sync_weights listens for `direct`, or a network such as 10.0.0.0/24, in which it listens at its
    host's own address. Any but loopback is open to the network."""
    deadline_seconds: Positive = 30.0
    """Time for a generator to receive a version, seconds. A generator that takes longer is named in the log and gets it
    through the store."""
    probe_tolerance: Positive | None = None
    """An alarm is raised if log-probabilities of generator and trainer on the same weights differ by more than this,
    nats; null: 1e-3 if both compute in float32, else if their next tokens diverge by more than 0.03 nats."""

    @field_validator("host")
    @classmethod
    def _is_an_address_or_a_network(cls, host: str) -> str:
        return ipv4_network(host) if "/" in host else host


class StorageConfig(Section):
    """Where the run is stored, and when generators commit trajectories."""

    root: Text = "runs"
    """Path, file:///path, s3://bucket/prefix or memory://name; the run is stored at root/run id."""
    fsync: bool = True
    """Whether local writes are flushed to disk before they count as committed."""
    commit_max_rows: Count = 4096
    """A generator commits once it holds this many finished trajectories."""
    commit_max_bytes: Count = 64 * 2**20
    """A generator also commits once its finished trajectories reach this size, bytes of Arrow data."""
    commit_max_ms: NonNegative = 10.0
    """A generator also commits once the oldest has waited this long, milliseconds; 0 commits each batch before the
    next."""
    commit_unfinished_seconds: Positive | None = None
    """How often a generator also stores its unfinished responses, seconds, to continue them after kill -9. Each time
    the engine reads their tokens again. null: only when the generator drains. No effect in `sync` mode."""


class PromotionConfig(Section):
    """When the latest checkpoint is promoted. It is evaluated at the end of each attempt."""

    margin: NonNegative | None = 0.0
    """A checkpoint is promoted if its held-out accuracy exceeds that of the last promoted one (at first the start
    model's) by more than this; null: never."""


class RunConfig(Section):
    """All settings of a run."""

    name: str = "campaign"
    """Display name of the run: at most 64 letters, digits, `.`, `_` and `-`."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of all random numbers of the run."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """How stages are scheduled against each other."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy before its first update."""
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    """What the policy is asked."""
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """How responses are sampled."""
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    """What answers the policy between its turns."""
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    """How responses are rewarded."""
    training: TrainingConfig
    """How the policy is trained."""
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    """Maximum age of a trajectory when it is trained on."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """How new policy versions are sent to the generators."""
    storage: StorageConfig = Field(default_factory=StorageConfig)
    """Where the run is stored."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """How progress is measured."""
    promotion: PromotionConfig = Field(default_factory=PromotionConfig)
    """When a checkpoint is promoted."""
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """Limits of one attempt."""
    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig)
    """When a stage counts as hung."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """On which hosts stages run."""
    plan: PlanConfig = Field(default_factory=PlanConfig)
    """What was predicted of the run."""

    @property
    def effective_max_staleness(self) -> int:
        """The staleness bound in force, policy versions."""
        return staleness_bound(self.pipeline.mode, self.staleness.max_staleness)

    @property
    def effective_training(self) -> TrainingConfig:
        """How the policy is trained: adaptive control scales the learning rate by √ESS."""
        if self.staleness.control == "fixed" or self.training.schedule.ess_scaling:
            return self.training
        schedule = self.training.schedule.model_copy(update={"ess_scaling": True})
        return self.training.model_copy(update={"schedule": schedule})

    @property
    def generation_dtype(self) -> str:
        """Number format of the weights in generators."""
        return self.generation.dtype or self.model.dtype

    @field_validator("name")
    @classmethod
    def _is_a_plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
        return name

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if mistakes := list(impossible_combinations(self)):
            raise ConfigError(mistakes)
        return self


def dotted_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """The pydantic field of every key of `model`, sections included, by its dotted name such as `section.key`."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        if is_section(field.annotation):
            fields |= dotted_fields(field.annotation, f"{prefix}{name}.")
    return fields
