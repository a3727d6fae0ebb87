"""GPUs of one kind and a model: costs of a config there, and whether it fits.

Trainer and generators run on GPUs of this kind, and generators as vLLM does, whatever device and engine the config
names.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

from configs.requests import GivenLengthsConfig
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import (
    Costs,
    Lengths,
    log_normal_lengths,
    max_group_size,
    max_new_tokens,
    mixed_lengths,
    with_shares,
)
from millrace.planning.generation import KernelTable
from millrace.planning.hardware import GIB, HOST_COPY_SHARE, Hardware
from millrace.planning.memory import MemoryReport, generator_memory, trainer_memory
from millrace.planning.models import BYTES, ModelShape
from millrace.planning.training import (
    MFU,
    TRAINED_BYTES,
    checkpoint_seconds,
    step_seconds,
    sync_seconds,
    trainer_gpus,
)
from millrace.runtime.devices import generator_devices

_SCORE_SECONDS = 5e-3
"""Seconds of a rule such as `math` for a response."""
_STEP_OVERHEAD = 0.1
"""Seconds of a trainer between two steps: reading, accounts, metrics."""
_MEAN_SHARE, _SIGMA, _PROMPT_TOKENS = 0.5, 0.6, 256
"""Default lengths: mean ÷ `generation.max_new_tokens`, spread, tokens of a prompt."""


def num_gpus(config: RunConfig) -> int:
    """Counts the GPUs of the trainer and of all generators; colocated, the larger number."""
    generators = config.generation.replicas * generator_gpus(config)
    return max(trainer_gpus(config), generators) if config.placement.colocated else trainer_gpus(config) + generators


def generator_gpus(config: RunConfig) -> int:
    """Counts the GPUs of one generator. Raises InputError for engine arguments whose costs are not known."""
    arguments = config.generation.engine_args
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if arguments.get(name, 1) != 1:
            raise InputError(
                key=f"generation.engine_args.{name}",
                read=arguments[name],
                expected="1: a plan knows tensor_parallel_size alone",
            )
    return generator_devices(config)


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuMachine:
    """GPUs of one kind and a model."""

    shape: ModelShape
    hardware: Hardware
    given_lengths: GivenLengthsConfig | None = None
    """None: responses of half of `generation.max_new_tokens`, σ 0.6, prompts of 256 tokens."""
    _tables: dict[tuple[int, str, str], KernelTable] = field(default_factory=dict, repr=False)

    @property
    def name(self) -> str:
        return f"{self.shape.name} on {self.hardware.name}"

    def costs(self, config: RunConfig) -> Costs:
        """Returns durations. Raises InputError for a layout that can't divide the model or has no figures."""
        self._check_layout(config)
        shape = self.shape
        trainer, generator = trainer_gpus(config), generator_gpus(config)
        dtype = _weights_dtype(config)
        trainer_moves = generator_moves = 0.0
        if config.placement.colocated:
            # By turns, weights and two moments go to the CPU's memory and back; gradients are dropped.
            rate = self.hardware.host_copy * HOST_COPY_SHARE
            trainer_moves = 2 * 3 * shape.parameters * TRAINED_BYTES / trainer / rate
            generator_moves = 2 * shape.parameters * BYTES[dtype] / generator / rate
        table = self._table(config)
        handover, push, pause = sync_seconds(
            shape, config, self.hardware, generator_gpus=generator, dtype=config.generation_dtype
        )
        return Costs(
            decode=table.decode,
            prefill=table.prefill,
            score=_SCORE_SECONDS / config.scoring.workers,
            train=lambda tokens, rollouts: step_seconds(shape, config, self.hardware, tokens=tokens, rollouts=rollouts),
            handover=handover,
            push=push,
            pause=pause + generator_moves,
            checkpoint=checkpoint_seconds(shape, config, self.hardware),
            overhead=_STEP_OVERHEAD + trainer_moves,
        )

    def lengths(self, config: RunConfig) -> Lengths:
        """Returns the given lengths, cut off at `generation.max_new_tokens`, of each source by its weight."""
        return mixed_lengths((share, self._lengths_of_source(source)) for share, source in with_shares(config))

    def _lengths_of_source(self, config: RunConfig) -> Lengths:
        lengths, generation = self._chosen_lengths(config), config.generation
        return log_normal_lengths(
            prompt=lengths.prompt,
            mean=lengths.mean,
            sigma=lengths.sigma,
            max_tokens=generation.max_new_tokens,
            group_size=generation.group_size,
        )

    def memory(self, config: RunConfig) -> MemoryReport:
        """Returns the memory per GPU. Raises InputError for a layout that can't divide the model."""
        self._check_layout(config)
        generation = config.generation
        means = self.lengths(config).means
        # Prefix caching keeps the prompt of a group once. There is always room for one response of the greatest length.
        cached = generation.groups_per_batch * (means.prompt + max_group_size(config) * means.running)
        generator = generator_memory(
            self.shape,
            self.hardware,
            tensor=generator_gpus(config),
            dtype=_weights_dtype(config),
            kv_dtype=_cache_dtype(config),
            cached_tokens=max(cached, means.prompt + max_new_tokens(config)),
            memory_share=generation.engine_args.get("gpu_memory_utilization"),
        )
        return MemoryReport(
            trainer=trainer_memory(self.shape, config).total,
            generator=generator,
            hardware_name=self.hardware.name,
            capacity=self.hardware.memory_bytes,
        )

    def assumptions(self, config: RunConfig) -> Mapping[str, str]:
        """Returns lengths, model, hardware and number formats."""
        hardware, shape = self.hardware, self.shape
        origin = "--lengths" if self.given_lengths else "a default: give --lengths, or --from a stored run"
        lengths = [(source.generation, self._chosen_lengths(source)) for source in config.by_source().values()]
        of_sources = "; ".join(
            f"prompts of {each.prompt:,} tokens, responses log-normal with mean {each.mean:,.0f}, σ {each.sigma:g}, "
            f"cut off at {generation.max_new_tokens:,}"
            for generation, each in lengths
        )
        return {
            "lengths": f"{of_sources} ({origin})",
            "model": f"{shape.name}, {shape.parameters / 1e9:.1f} billion parameters",
            hardware.name: f"{hardware.flops['bfloat16'] / 1e12:,.0f} bf16 TFLOP/s, {hardware.memory_bytes / GIB:.0f} "
            f"GiB at {hardware.memory_rate / 1e12:.2f} TB/s, NVLink {hardware.nvlink / 1e9:.0f} GB/s, network "
            f"{hardware.network / 1e9:.0f} GB/s per GPU (data sheet)",
            "generation": f"{_weights_dtype(config)}, TP {generator_gpus(config)} ({self._table(config).source})",
            "training": f"{config.compute_dtype}, {MFU:.0%} of its FLOP/s without collectives (published trainers)",
        }

    def _check_layout(self, config: RunConfig) -> None:
        """Trainer ranks have whole heads and equal parts of the feed-forward blocks; experts are not divided.

        vLLM divides query heads, and puts a key-value head on several GPUs if there are fewer of them.
        """
        shape, trainer, generator = self.shape, config.training.parallel.tensor, generator_gpus(config)
        heads = f"{shape.heads} heads, {shape.kv_heads} of keys and values"
        divisor = f"a number that divides {shape.name}'s {heads}, and {shape.intermediate} features"
        if shape.experts and trainer > 1:
            raise InputError(trainer, key="training.parallel.tensor", expected="1, because ranks don't divide experts")
        if shape.kv_heads % trainer or shape.heads % trainer or shape.intermediate % trainer:
            raise InputError(trainer, key="training.parallel.tensor", expected=divisor)
        shares_heads = shape.kv_heads % generator == 0 or generator % shape.kv_heads == 0
        if shape.heads % generator or shape.intermediate % generator or not shares_heads:
            raise InputError(generator, key="generation.engine_args.tensor_parallel_size", expected=divisor)

    def _table(self, config: RunConfig) -> KernelTable:
        key = tensor, dtype, kv_dtype = generator_gpus(config), _weights_dtype(config), _cache_dtype(config)
        if key not in self._tables:
            self._tables[key] = KernelTable(self.shape, self.hardware, tensor=tensor, dtype=dtype, kv_dtype=kv_dtype)
        return self._tables[key]

    def _chosen_lengths(self, config: RunConfig) -> GivenLengthsConfig:
        if self.given_lengths is not None:
            return self.given_lengths
        mean = max(1.0, _MEAN_SHARE * config.generation.max_new_tokens)
        return GivenLengthsConfig(mean=mean, sigma=_SIGMA, prompt=_PROMPT_TOKENS)


def _weights_dtype(config: RunConfig) -> str:
    quantization = config.generation.engine_args.get("quantization")
    if quantization is None:
        return config.generation_dtype
    if "fp8" in str(quantization):
        return "fp8"
    raise InputError(key="generation.engine_args.quantization", read=f'"{quantization}"', expected="fp8, or none")


def _cache_dtype(config: RunConfig) -> str:
    cache = config.generation.engine_args.get("kv_cache_dtype", "auto")
    return "fp8" if "fp8" in str(cache) else config.generation_dtype
