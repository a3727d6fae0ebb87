"""A machine of GPUs of one kind, by the cost models."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from configs.schema import RunConfig
from millrace.planning.costs.assumptions import DEFAULTS, Assumptions
from millrace.planning.costs.campaign import (
    MemoryReport,
    campaign_costs,
    check_memory,
    generator_gpus,
    roofline,
    trainer_setup,
)
from millrace.planning.costs.generation import GenerationModel
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.kernel_tables import with_tables
from millrace.planning.costs.model_shape import ModelShape
from millrace.planning.costs.storage import StoredBytes, checkpoint_bytes, rollout_bytes, stored_bytes
from millrace.planning.search.bounds import work_of
from millrace.planning.search.machine import Assumption
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths, LogNormalLengths

_MEAN_SHARE = 0.5
_SIGMA = 0.6
_PROMPT_TOKENS = 256


@dataclass(frozen=True, kw_only=True, slots=True)
class GivenLengths:
    """Log-normal lengths that a person gives, tokens."""

    mean: float
    sigma: float
    prompt: int


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuMachine:
    """GPUs of one kind and a model."""

    shape: ModelShape
    hardware: Hardware
    given: GivenLengths | None = None
    """None: responses of half of `generation.max_new_tokens`, σ 0.6, prompts of 256 tokens."""
    constants: Assumptions = DEFAULTS
    _generators: dict[tuple[int, str, str], GenerationModel] = field(default_factory=dict, repr=False)
    """By size and number formats: opening a table takes a second."""

    @property
    def name(self) -> str:
        """The model on the hardware."""
        return f"{self.shape.name} on {self.hardware.name}"

    def allows_trainer_tensor(self, size: int) -> bool:
        """Ranks have whole key-value heads, and equal parts of the feed-forward blocks."""
        shape = self.shape
        return not any(number % size for number in (shape.heads, shape.kv_heads, shape.intermediate))

    def allows_generator_tensor(self, size: int) -> bool:
        """vLLM divides query heads, and puts a key-value head on several GPUs if there are fewer of them."""
        shape = self.shape
        heads_fit = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
        return shape.heads % size == 0 and shape.intermediate % size == 0 and heads_fit

    def costs(self, config: RunConfig) -> Costs:
        """By the cost models."""
        generation = self._generator(config)
        return campaign_costs(config, self.shape, self.hardware, assumptions=self.constants, generation=generation)

    def lengths(self, config: RunConfig) -> Lengths:
        """Those given, cut off at `generation.max_new_tokens`."""
        given = self._lengths(config)
        return LogNormalLengths(
            prompt_tokens=given.prompt,
            mean_tokens=given.mean,
            sigma=given.sigma,
            max_tokens=config.generation.max_new_tokens,
            group_size=config.generation.group_size,
        )

    def memory(self, config: RunConfig) -> MemoryReport:
        """Of trainer and generators."""
        return check_memory(config, self.shape, self.hardware, self.lengths(config), assumptions=self.constants)

    def storage(self, config: RunConfig, step_seconds: float) -> StoredBytes:
        """Trajectories and checkpoints."""
        work = work_of(self.lengths(config))
        return stored_bytes(
            rollout_bytes(work.prompt, work.response),
            rollouts_per_step=config.training.groups_per_step * config.generation.group_size,
            checkpoint=checkpoint_bytes(self.shape, trainer_setup(config)),
            checkpoint_every=config.training.checkpoint_every,
            step_seconds=step_seconds,
        )

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """Lengths, hardware, shares of its rates, number formats."""
        given, hardware, constants = self._lengths(config), self.hardware, self.constants
        compute = config.training.compute_dtype or config.model.dtype
        lengths = (
            f"prompts of {given.prompt:,} tokens, responses log-normal with mean {given.mean:,.0f}, σ {given.sigma:g}, "
            f"cut off at {config.generation.max_new_tokens:,}"
        )
        billions = f"{self.shape.parameters / 1e9:.1f} billion parameters"
        rates = (
            f"{hardware.flops_in('bfloat16') / 1e12:,.0f} bf16 TFLOP/s, {hardware.memory_bytes / 2**30:.0f} GiB at "
            f"{hardware.memory_rate / 1e12:.2f} TB/s, NVLink {hardware.nvlink / 1e9:.0f} GB/s, network "
            f"{hardware.network / 1e9:.0f} GB/s per GPU"
        )
        return (
            Assumption(
                what="lengths",
                value=lengths,
                source="--lengths" if self.given else "a guess: give --lengths, or --from a stored run",
            ),
            Assumption(what="model", value=f"{self.shape.name}, {billions}", source="sizes of its config.json"),
            Assumption(what=hardware.name, value=rates, source="data sheet"),
            Assumption(
                what="generation",
                value=f"{config.generation_dtype}, TP {generator_gpus(config)}",
                source=self._generator(config).source,
            ),
            Assumption(
                what="training",
                value=f"{compute}, {constants.mfu:.0%} of its FLOP/s without collectives",
                source="fitted MFU of published trainers",
            ),
        )

    def _generator(self, config: RunConfig) -> GenerationModel:
        """By NVIDIA's tables where they are installed and have this model's kernels."""
        bound = roofline(config, self.shape, self.hardware, assumptions=self.constants)
        key = bound.tensor, bound.dtype, bound.kv_dtype
        if key not in self._generators:
            self._generators[key] = with_tables(bound)
        return self._generators[key]

    def _lengths(self, config: RunConfig) -> GivenLengths:
        if self.given is not None:
            return self.given
        mean = max(1.0, _MEAN_SHARE * config.generation.max_new_tokens)
        return GivenLengths(mean=mean, sigma=_SIGMA, prompt=_PROMPT_TOKENS)
