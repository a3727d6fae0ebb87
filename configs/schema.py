"""All settings of a run, typed: `RunConfig` and its sections.

The parameters of a choice, such as a loss (`training.loss`), are a small separate schema, and one key of the run.

Unknown keys, wrong types and non-finite numbers are refused. Nothing is converted, except a whole number where a real
one is expected. `configs.checks.combinations` checks settings against each other.
"""

import re
from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, Field, field_serializer, field_validator, model_validator
from pydantic.fields import FieldInfo

from configs.checks.combinations import impossible_combinations
from configs.errors import ConfigError
from configs.generation import GenerationConfig, adapter_arguments
from configs.operation import (
    SHARDED,
    BudgetConfig,
    MirrorConfig,
    PlacementConfig,
    PromotionConfig,
    StalenessConfig,
    StorageConfig,
    SupervisionConfig,
    WeightsConfig,
    choose_transport,
)
from configs.section import Section, Text, choices, is_section
from configs.sources import SECTIONS, SourceConfig, overlaid
from configs.stored import DEFAULT_SOURCE, AnnotatorPools, staleness_bound
from configs.task import EnvironmentConfig, EvaluationConfig, PromptsConfig, ScoringConfig
from configs.training import TeacherConfig, TrainingConfig

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
_SOURCE_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_-]{0,31}")


class PipelineConfig(Section):
    """How stages are scheduled against each other."""

    mode: Literal["async", "sync"] = "async"
    """`async`: generators run ahead by up to `staleness.max_staleness`; `sync`: each step waits for its own
    rollouts."""


class ModelConfig(Section):
    """The policy before its first update (version 0)."""

    path: Text | None = None
    """Folder of a Hugging Face causal language model and its tokenizer, or its ORG/NAME on a hub; path or URL of a
    stored run, whose promoted checkpoint is the start model; null: create a tiny one, warm-started on the training
    prompts."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Number format of the weights in every stage; `generation.dtype` overrides it for generators, and
    `training.compute_dtype` for the trainer's passes. The trainer keeps the weights that it trains in float32."""
    chat_template: Text | None = None
    """File with a chat template (Jinja) to use in place of the tokenizer's own; exported models get it too."""
    renderer: Text = "auto"
    """How conversations are written: `template`: by the tokenizer's chat template; a name of the library `renderers`,
    such as `qwen3`; `auto`: by the library where it writes the same tokens as the template, else by the template."""
    warm_start_steps: Annotated[int, Field(ge=0)] | None = None
    """Maximum optimizer steps of the warm start if `path` is null; null: as many as the prompts need."""


class RunConfig(Section):
    """All settings of a run."""

    name: str = "campaign"
    """Display name of the run: at most 64 letters, digits, `.`, `_` and `-`."""
    seed: Annotated[int, Field(ge=0, le=2**32 - 1)] = 0
    """Seed of all random numbers of the run."""
    pipeline: PipelineConfig = Field(default_factory=PipelineConfig)
    model: ModelConfig = Field(default_factory=ModelConfig)
    teachers: dict[str, TeacherConfig] = Field(default_factory=dict)
    """Teachers by name, such as `{expert: {path: models/expert}}`; `training.distillation.teacher` names one."""
    sources: dict[str, SourceConfig] = Field(default_factory=dict)
    """Sources of a mixture by name, each with its `weight` and its own keys, such as
    `{sums: {weight: 2}, words: {prompts: {source: words.jsonl}}}`; {}: the run has one source."""
    prompts: PromptsConfig = Field(default_factory=PromptsConfig)
    generation: GenerationConfig = Field(default_factory=GenerationConfig)
    environment: EnvironmentConfig = Field(default_factory=EnvironmentConfig)
    scoring: ScoringConfig = Field(default_factory=ScoringConfig)
    training: TrainingConfig
    staleness: StalenessConfig = Field(default_factory=StalenessConfig)
    weights: WeightsConfig = Field(default_factory=WeightsConfig)
    storage: StorageConfig = Field(default_factory=StorageConfig)
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig)
    promotion: PromotionConfig = Field(default_factory=PromotionConfig)
    budget: BudgetConfig = Field(default_factory=BudgetConfig)
    supervision: SupervisionConfig = Field(default_factory=SupervisionConfig)
    mirror: MirrorConfig = Field(default_factory=MirrorConfig)
    placement: PlacementConfig = Field(default_factory=PlacementConfig)

    def by_source(self) -> dict[str, "RunConfig"]:
        """The settings of each source by name: the run's, with the source's own in their place.

        A run without `sources` is one source, `default`.
        """
        if not self.sources:
            return {DEFAULT_SOURCE: self}
        return {
            name: self.model_copy(
                update={
                    "sources": {},
                    **{section: overlaid(getattr(self, section), getattr(source, section)) for section in SECTIONS},
                }
            )
            for name, source in self.sources.items()
        }

    def trainings(self) -> dict[str, TrainingConfig]:
        """How the policy is trained on the groups of each source."""
        return {name: config.effective_training for name, config in self.by_source().items()}

    @property
    def annotators(self) -> AnnotatorPools:
        """Which scorers and teachers annotate which sources."""
        sections: Any = {"scoring": True, "sources": True, "teachers": True, "training": {"distillation"}}
        return AnnotatorPools.of(self.model_dump(mode="json", include=sections))

    def teacher_of(self, replica: int) -> tuple[str, TeacherConfig]:
        """Name and settings of the teacher that a replica of the stage `teach` computes."""
        pool, _ = self.annotators.annotator("teachers", replica)
        name = pool.removeprefix("teachers/")
        return name, self.teachers[name]

    @property
    def loads_scoring_model(self) -> bool:
        """Whether scorers load a model for any source."""
        return any(config.scoring.loads_model for config in self.by_source().values())

    @property
    def stores_prompt_blocks(self) -> bool:
        """Whether prompts of groups are decided in stored blocks; with `sources`, as there may be more on resume."""
        return bool(self.sources) or self.prompts.curriculum_window is not None

    @property
    def effective_max_staleness(self) -> int:
        """The staleness bound in force, policy versions."""
        return staleness_bound(self.pipeline.mode, self.staleness.max_staleness)

    @property
    def bounds_admission_only(self) -> bool:
        """Whether the staleness bound limits admission only, so that a trained token may be older than the bound."""
        return self.pipeline.mode == "async" and self.staleness.too_old == "keep"

    @property
    def effective_training(self) -> TrainingConfig:
        """How the policy is trained: adaptive control scales the learning rate by √ESS."""
        if self.staleness.control == "fixed" or self.training.schedule.ess_scaling:
            return self.training
        schedule = self.training.schedule.model_copy(update={"ess_scaling": True})
        return self.training.model_copy(update={"schedule": schedule})

    @property
    def effective_weights(self) -> WeightsConfig:
        """How weights are sent: with the transport that `auto` stands for."""
        return self.weights.model_copy(update={"transport": choose_transport(self).transport})

    @property
    def compute_dtype(self) -> str:
        """Number format of the trainer's passes."""
        return self.training.compute_dtype or self.model.dtype

    @property
    def generation_dtype(self) -> str:
        """Number format of the weights in generators."""
        on_gpus = self.generation.engine == "vllm" and self.training.device == "cuda"
        return self.generation.dtype or ("bfloat16" if on_gpus else self.model.dtype)

    @property
    def sends_adapters(self) -> bool:
        """Whether generators get the LoRA adapter of each version instead of the whole model.

        Transports that send each rank's shards send those of the merged weights.
        """
        return self.training.lora.rank is not None and self.effective_weights.transport not in SHARDED

    @property
    def vllm_adapter_arguments(self) -> dict[str, Any]:
        """Arguments of vLLM for this run's LoRA adapters; none with another engine, or if versions are whole models."""
        lora = self.training.lora
        if lora.rank is None or not self.sends_adapters or self.generation.engine != "vllm":
            return {}
        return adapter_arguments(lora.rank, lora.target_modules, self.effective_max_staleness)

    @field_validator("name")
    @classmethod
    def _is_a_plain_name(cls, name: str) -> str:
        if not _NAME.fullmatch(name):
            raise ValueError("1 to 64 letters, digits, '.', '_' or '-', the first a letter or digit")
        return name

    @field_validator("sources", "teachers")
    @classmethod
    def _have_plain_names(cls, by_name: dict[str, Any]) -> dict[str, Any]:
        if wrong := [name for name in by_name if not _SOURCE_NAME.fullmatch(name)]:
            raise ValueError(f"names of 1 to 32 letters, digits, '_' and '-', the first a letter; found {wrong[0]!r}")
        return by_name

    @field_serializer("sources")
    def _without_inherited(self, sources: dict[str, SourceConfig]) -> dict[str, Any]:
        # A stored source inherits the settings that it leaves out, as it does in its file.
        return {name: source.model_dump(mode="json", exclude_unset=True) for name, source in sources.items()}

    @model_validator(mode="after")
    def _is_possible(self) -> Self:
        if mistakes := list(impossible_combinations(self)):
            raise ConfigError(mistakes)
        return self


def dotted_fields(
    model: type[BaseModel] = RunConfig, prefix: str = "", *, with_parameters: bool = False
) -> dict[str, FieldInfo]:
    """The pydantic field of every key of `model`, sections included, by its dotted name such as `section.key`.

    `with_parameters`: also those of losses and other choices, such as `training.loss.clip_low`.
    """
    fields: dict[str, FieldInfo] = {}
    for name, field in model.model_fields.items():
        fields[prefix + name] = field
        below = (field.annotation,) if is_section(field.annotation) else choices(field.annotation)
        if with_parameters or is_section(field.annotation):
            for part in below:
                fields |= dotted_fields(part, f"{prefix}{name}.", with_parameters=with_parameters)
    return fields


OF_SOURCE = "sources.NAME."
"""Where `known_fields` has the keys of a source."""


def known_fields() -> dict[str, FieldInfo]:
    """`dotted_fields` with the parameters of choices and the keys of a source, such as `sources.NAME.weight`."""
    return dotted_fields(with_parameters=True) | dotted_fields(SourceConfig, OF_SOURCE, with_parameters=True)


def schema_key(key: str) -> str:
    """The name that a key has among `known_fields`: a source's own name is left out."""
    top, *below = key.split(".", 2)
    return f"{OF_SOURCE}{below[1]}" if top == "sources" and len(below) == 2 else key
