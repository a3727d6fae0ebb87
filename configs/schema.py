"""Every knob of a run, typed: `RunConfig` and its sections.

    RunConfig ─┬─ name, seed
               ├─ pipeline     which schedule               ├─ staleness    how old a rollout may be
               ├─ model        which weights to start from  ├─ weights      how new weights travel
               ├─ prompts      what is asked                ├─ storage      where the run lives
               ├─ generation   how rollouts are made        ├─ evaluation   how progress is measured
               ├─ scoring      what earns a reward          ├─ promotion    which checkpoint is the one to use
               ├─ training     how the policy learns        ├─ supervision  when a stage is taken to hang
               ├─ budget       how much one attempt may do  ├─ environment  what answers between two turns
               └─ placement    on whose hosts the stages run

Unknown keys, wrong types and non-finite numbers are refused, and nothing is converted except a whole number given for
a real one. Whatever a single field can't decide is decided in `configs.combinations`.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_validator, model_validator
from pydantic.fields import FieldInfo

from configs.combinations import impossible_combinations
from configs.engine_args import EngineArgument
from configs.environment import EnvironmentConfig
from configs.prompts import EvaluationConfig, PromptsConfig
from configs.scoring import ScoringConfig
from configs.section import Count, NonNegative, Positive, Replicas, Section, Text, is_section
from configs.training import TrainingConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


class PipelineConfig(Section):
    """How the stages wait for each other."""

    mode: Literal["async", "sync"] = "async"
    """`async`: stages run ahead by up to `staleness.max_staleness`; `sync`: each step waits for its own rollouts."""


class BootstrapConfig(Section):
    """The tiny Llama model a run makes for itself when `model.path` is null, warm-started on the training prompts."""

    hidden_size: Count = 64
    """Width of the residual stream, features; an even multiple of `num_heads`."""
    num_layers: Count = 3
    """Depth of the model, transformer layers."""
    num_heads: Count = 4
    """Attention heads of each layer."""
    intermediate_size: Count = 256
    """Width of each feed-forward block, features."""
    slip_rate: Annotated[float, Field(ge=0, le=1)] = 0.65
    """Fraction of the demonstrations of arithmetic that get the carry wrong; other prompts have none that do."""
    target_fluency: Annotated[float, Field(gt=0, le=1)] = 0.95
    """The warm start ends once this fraction of greedy answers is what a demonstrator could have said."""
    max_accuracy: Annotated[float, Field(ge=0, le=1)] = 1.0
    """The warm start does not end while more than this fraction of greedy answers is right: something must be left."""
    max_steps: Count = 2000
    """Most supervised optimizer steps of the warm start."""
    batch_size: Count = 128
    """Prompts in each supervised step."""
    learning_rate: Positive = 2e-3
    """AdamW learning rate of the supervised steps, per step."""
    threads: Count = 2
    """CPU threads of the warm start, which runs before any stage does."""


class ModelConfig(Section):
    """The policy before its first update (version 0)."""

    path: Text | None = None
    """Folder of a Hugging Face causal language model with its tokenizer; null makes one by `model.bootstrap`."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in every stage; generators may have one of their own, `generation.dtype`."""
    bootstrap: BootstrapConfig = Field(default_factory=BootstrapConfig)
    """The model to make when `model.path` is null."""


class GenerationConfig(Section):
    """How rollouts are made."""

    engine: Literal["transformers", "vllm"] = "transformers"
    """Library that samples the tokens; `vllm` wants `make vllm` once."""
    engine_args: dict[EngineArgument, Any] = Field(default_factory=dict)
    """Arguments of vLLM's engine by their own names, such as `tensor_parallel_size`, `quantization`, `max_model_len`;
    only with the engine `vllm`."""
    dtype: Literal["float32", "bfloat16"] | None = None
    """Number format of the weights in generators; null: that of `model.dtype`."""
    replicas: Replicas = 1
    """Generator processes."""
    group_size: Annotated[int, Field(ge=2)] = 8
    """Rollouts of each prompt; their mean reward is the baseline of each."""
    groups_per_batch: Count = 16
    """Groups that a generator samples together; with vllm, the most that it has in flight."""
    temperature: Positive = 1.0
    """Divides the logits before sampling, no unit."""
    top_p: Annotated[float, Field(gt=0, le=1)] = 1.0
    """Probability mass of the nucleus sampled from; 1 keeps the whole vocabulary."""
    max_new_tokens: Count = 16
    """Longest response, tokens; the end-of-sequence token counts."""
    threads: Count = 1
    """CPU threads of each generator."""


class StalenessConfig(Section):
    """How old a rollout may be when it is trained on."""

    max_staleness: Annotated[int, Field(ge=0)] = 4
    """Most policy versions by which the trainer may be ahead of a rollout's oldest one; `sync` mode takes 0 instead."""


class WeightsConfig(Section):
    """How a new policy version reaches the generators."""

    transport: Literal["shm", "broadcast", "store"] = "shm"
    """`shm`: shared memory of one host; `broadcast`: sent to all generators at once by gloo; `store`: files in the
    run's storage, at any distance."""
    host: Text = "127.0.0.1"
    """Address that sync_weights listens at for `broadcast`; anything but loopback is open to the network."""
    deadline_seconds: Positive = 30.0
    """After so long, a generator that has not taken a version is named in the log and served through the store,
    seconds."""
    probe_tolerance: Positive | None = None
    """Largest difference between a generator's log-probability and the trainer's on the same weights before an alarm,
    nats; null: 1e-3 where both are float32, else 0.1."""


class StorageConfig(Section):
    """Where the run lives, and when what a generator made becomes part of its stream."""

    root: Text = "runs"
    """A path, file:///path, s3://bucket/prefix or memory://name; the run is stored at root/run id."""
    fsync: bool = True
    """Whether local writes are forced to disk before they count as committed."""
    commit_max_rows: Count = 4096
    """A generator commits what it has made once it has this many trajectories."""
    commit_max_bytes: Count = 64 * 2**20
    """It also does once they are this many bytes of Arrow."""
    commit_max_ms: NonNegative = 10.0
    """Or once the oldest has waited for so long, milliseconds; 0 commits each batch before the next one is begun."""


class PromotionConfig(Section):
    """Which checkpoint is the one to use: evaluated at the end of each attempt, and promoted if it is better."""

    margin: NonNegative | None = 0.0
    """By more than this its held-out accuracy must exceed the last promoted one's, or the start model's; null: nothing
    is promoted."""


class BudgetConfig(Section):
    """How much one attempt may do, such as one night of a campaign. The run goes on with the next one."""

    duration_minutes: Positive | None = None
    """After so long the stages drain, and the last checkpoint is evaluated; minutes, null for no limit."""
    max_steps: Count | None = None
    """Most optimizer steps of one attempt; null for no limit but `training.max_steps`."""


class SupervisionConfig(Section):
    """When a stage is taken to hang: it is named then, killed, and started again."""

    hang_seconds: Positive = 45.0
    """Without a sign of progress, seconds; more than the longest optimizer step, batch or checkpoint takes."""
    start_seconds: Positive = 600.0
    """The same, while a stage starts and loads its model."""


class PlaceConfig(Section):
    """Where one stage runs."""

    work_pool: Text | None = None
    """Prefect work pool whose workers start it on their hosts; null: beside the controller."""
    job_variables: dict[str, Any] = Field(default_factory=dict)
    """Variables of that pool's job template, such as how many GPUs a job gets."""


class PlacementConfig(Section):
    """On whose hosts the stages run. Every one of them must see `storage.root`, and run the same code."""

    colocated: bool = False
    """Whether trainer and generators share their devices and take turns on them: a generator gives its memory there
    back when it has made all rollouts of a version, the trainer when it has stepped. Only in `sync` mode."""
    generate: PlaceConfig = Field(default_factory=PlaceConfig)
    """Of the generators, each a job of its own."""
    score: PlaceConfig = Field(default_factory=PlaceConfig)
    """Of the scorers, each a job of its own."""
    train: PlaceConfig = Field(default_factory=PlaceConfig)
    """Of the trainer and sync_weights, which share memory: one job."""


class RunConfig(Section):
    """Everything a person decides about a run."""

    name: str = "campaign"
    """What the run is called where people look at it; letters, digits, `.`, `_` and `-`, at most 64."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Root of every random draw of the run."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    """How the stages wait for each other."""
    model: ModelConfig = Field(default_factory=ModelConfig)
    """The policy before its first update."""
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    """What the policy is asked."""
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    """How rollouts are made."""
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    """What the policy talks to between its turns."""
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    """What earns a reward."""
    training: TrainingConfig
    """How the policy learns."""
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    """How old a rollout may be when it is trained on."""
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    """How a new policy version reaches the generators."""
    storage: StorageConfig = Field(default_factory=StorageConfig)
    """Where the run lives."""
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    """How progress is measured."""
    promotion: PromotionConfig = Field(default_factory=PromotionConfig)
    """Which checkpoint is the one to use."""
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    """How much one attempt may do."""
    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig)
    """When a stage is taken to hang."""
    placement: PlacementConfig = Field(default_factory=PlacementConfig)
    """On whose hosts the stages run."""

    @property
    def effective_max_staleness(self) -> int:
        """The bound in force, policy versions: `staleness.max_staleness`, or 0 in sync mode whatever that key says.

        So `--set pipeline.mode=sync` alone turns any asynchronous config into its synchronous baseline.
        """
        return 0 if self.pipeline.mode == "sync" else self.staleness.max_staleness

    @property
    def generation_dtype(self) -> str:
        """Number format of the weights in generators: `generation.dtype`, or where that is null the trainer's."""
        return self.generation.dtype or self.model.dtype

    @field_validator("name")
    @classmethod
    def _is_a_plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
        return name

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if sentences := list(impossible_combinations(self)):
            raise ValueError("\n".join(sentences))
        return self


def dotted_fields(model: type[BaseModel] = RunConfig, prefix: str = "") -> dict[str, FieldInfo]:
    """Every key of `model`, sections and the keys in them, as `section.key` → its pydantic field."""
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        if is_section(field.annotation):
            fields |= dotted_fields(field.annotation, f"{prefix}{name}.")
    return fields
