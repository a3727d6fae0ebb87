"""GPUs of one kind and a model: what a config costs there, and whether it fits.

It assumes that trainer and generators run on GPUs, each of the hardware's kind, and generators as vLLM does, whatever
device and engine the config names.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from configs.recipe import choose_recipe
from configs.requests import GivenLengthsConfig
from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import Assumption, Costs, Lengths, LogNormalLengths, mean_lengths
from millrace.planning.generation import KernelTable, Roofline, with_tables
from millrace.planning.hardware import DEFAULTS, GIB, Assumptions, Hardware
from millrace.planning.memory import MemoryReport, generator_memory, trainer_memory
from millrace.planning.models import BYTES, ModelShape, shape_of_folder, shape_of_recipe
from millrace.planning.training import TrainerSetup, step_seconds
from millrace.planning.transfers import (
    bytes_per_day,
    checkpoint_bytes,
    checkpoint_seconds,
    rollout_bytes,
    share_lost,
    sync_seconds,
    trainer_mtbf,
)

_MEAN_SHARE, _SIGMA, _PROMPT_TOKENS = 0.5, 0.6, 256
"""Of lengths that nobody gives: mean ÷ `generation.max_new_tokens`, spread, tokens of a prompt."""


def shape_of_model(config: RunConfig) -> ModelShape:
    """Reads the sizes of the config's model. Raises ModelFolderError if its folder does not say them."""
    path = config.model.path
    return shape_of_recipe(choose_recipe(config)) if path is None else shape_of_folder(Path(path))


def num_gpus(config: RunConfig) -> int:
    """GPUs of the trainer and of all generators; colocated, those of whoever has more."""
    trainer = trainer_setup(config).gpus
    generators = config.generation.replicas * generator_gpus(config)
    return max(trainer, generators) if config.placement.colocated else trainer + generators


def generator_gpus(config: RunConfig) -> int:
    """GPUs of one generator. Raises InputError for engine arguments whose costs are not known."""
    arguments = config.generation.engine_args
    for name in ("pipeline_parallel_size", "data_parallel_size"):
        if arguments.get(name, 1) != 1:
            raise InputError(
                f"generation.engine_args.{name} is {arguments[name]}; expected 1: a plan knows tensor_parallel_size "
                "alone"
            )
    return int(arguments.get("tensor_parallel_size", 1))


def trainer_setup(config: RunConfig) -> TrainerSetup:
    """How the config trains."""
    training = config.training
    return TrainerSetup(
        data=training.parallel.data,
        tensor=training.parallel.tensor,
        frozen_dtype=config.model.dtype,
        compute_dtype=training.compute_dtype or config.model.dtype,
        activation_checkpointing=training.activation_checkpointing,
        max_tokens_per_microbatch=training.max_tokens_per_microbatch,
        minibatches=training.minibatches,
        epochs=training.epochs,
        frozen_layers=training.frozen_layers,
        lora_rank=training.lora.rank,
        lora_modules=tuple(training.lora.target_modules),
        reference=training.kl.coefficient > 0,
    )


@dataclass(frozen=True, kw_only=True, eq=False)
class GpuMachine:
    """GPUs of one kind and a model."""

    shape: ModelShape
    hardware: Hardware
    given: GivenLengthsConfig | None = None
    """None: responses of half of `generation.max_new_tokens`, σ 0.6, prompts of 256 tokens."""
    constants: Assumptions = DEFAULTS
    _generators: dict[tuple[int, str, str], Roofline | KernelTable] = field(default_factory=dict, repr=False)
    """Opening a table takes a second."""

    @property
    def name(self) -> str:
        """The model on the hardware."""
        return f"{self.shape.name} on {self.hardware.name}"

    def allows_trainer_tensor(self, size: int) -> bool:
        """Ranks have whole key-value heads, and equal parts of the feed-forward blocks; experts are not divided."""
        shape = self.shape
        divisible = not any(number % size for number in (shape.heads, shape.kv_heads, shape.intermediate))
        return size == 1 or (divisible and not shape.experts)

    def allows_generator_tensor(self, size: int) -> bool:
        """vLLM divides query heads, and puts a key-value head on several GPUs if there are fewer of them."""
        shape = self.shape
        heads_fit = shape.kv_heads % size == 0 or size % shape.kv_heads == 0
        return shape.heads % size == 0 and shape.intermediate % size == 0 and heads_fit

    def costs(self, config: RunConfig) -> Costs:
        """How long everything takes. Raises InputError for a layout by which the model can't be divided."""
        self._check_layout(config)
        constants, shape, setup = self.constants, self.shape, trainer_setup(config)
        # A trainer on several hosts has as many GPUs on each as fit there.
        per_host = min(self.hardware.gpus_per_host, max(1, setup.gpus // config.placement.train.hosts))
        hosts = self.hardware if config.placement.train.hosts == 1 else replace(self.hardware, gpus_per_host=per_host)
        generator = self._generator(config)
        sync = sync_seconds(
            config.weights.transport,
            shape,
            setup,
            hosts,
            constants,
            workers=generator_gpus(config),
            dtype=config.generation_dtype,
        )
        trainer_moves, generator_moves = self._turns(config, setup)

        def train(tokens: int, rollouts: int) -> float:
            return step_seconds(shape, setup, hosts, constants, tokens=tokens, rollouts=rollouts)

        return Costs(
            decode=generator.decode,
            prefill=generator.prefill,
            score=constants.score_seconds / config.scoring.workers,
            train=train,
            handover=sync.handover,
            push=sync.push,
            pause=sync.pause + generator_moves,
            checkpoint=checkpoint_seconds(shape, setup, self.hardware, constants),
            overhead=constants.step_overhead + trainer_moves,
        )

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
        """What trainer and generators need per GPU."""
        generation, arguments = config.generation, config.generation.engine_args
        means = mean_lengths(self.lengths(config))
        places = generation.groups_per_batch * generation.group_size
        # Prefix caching keeps the prompt of a group once. There is always room for one response of the greatest length.
        cached = generation.groups_per_batch * means.prompt + places * means.running
        generator = generator_memory(
            self.shape,
            self.hardware,
            self.constants,
            tensor=generator_gpus(config),
            dtype=_computed_in(config),
            kv_dtype=_cached_in(config),
            cached_tokens=max(cached, means.prompt + generation.max_new_tokens),
            memory_share=arguments.get("gpu_memory_utilization"),
        )
        return MemoryReport(
            trainer=trainer_memory(self.shape, trainer_setup(config), self.constants),
            generator=generator,
            hardware_name=self.hardware.name,
            capacity=self.hardware.memory_bytes,
        )

    def storage(self, config: RunConfig, step_seconds: float) -> tuple[float, float]:
        """Bytes that it writes a day, and bytes of a checkpoint."""
        means = mean_lengths(self.lengths(config))
        checkpoint = checkpoint_bytes(self.shape, trainer_setup(config))
        per_day = bytes_per_day(
            rollout_bytes(means.prompt, means.response),
            rollouts_per_step=config.training.groups_per_step * config.generation.group_size,
            checkpoint=checkpoint,
            checkpoint_every=config.training.checkpoint_every,
            step_seconds=step_seconds,
        )
        return per_day, checkpoint

    def failures(self, config: RunConfig, step_seconds: float) -> tuple[float, float]:
        """Mean seconds between two failures of the trainer, and the share of all time that they cost."""
        mtbf = trainer_mtbf(trainer_setup(config).gpus, self.constants)
        every = config.training.checkpoint_every
        return mtbf, share_lost(step_seconds, every, mtbf, self.constants.restart_seconds)

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        """Lengths, hardware, shares of its rates, number formats."""
        given, hardware, constants = self._lengths(config), self.hardware, self.constants
        compute = config.training.compute_dtype or config.model.dtype
        lengths = (
            f"prompts of {given.prompt:,} tokens, responses log-normal with mean {given.mean:,.0f}, σ {given.sigma:g}, "
            f"cut off at {config.generation.max_new_tokens:,}"
        )
        lengths_from = "--lengths" if self.given else "a default: give --lengths, or --from a stored run"
        model = f"{self.shape.name}, {self.shape.parameters / 1e9:.1f} billion parameters"
        rates = (
            f"{hardware.flops_in('bfloat16') / 1e12:,.0f} bf16 TFLOP/s, {hardware.memory_bytes / GIB:.0f} GiB at "
            f"{hardware.memory_rate / 1e12:.2f} TB/s, NVLink {hardware.nvlink / 1e9:.0f} GB/s, network "
            f"{hardware.network / 1e9:.0f} GB/s per GPU"
        )
        generation = f"{config.generation_dtype}, TP {generator_gpus(config)}"
        training = f"{compute}, {constants.mfu:.0%} of its FLOP/s without collectives"
        return (
            Assumption(what="lengths", value=lengths, source=lengths_from),
            Assumption(what="model", value=model, source="sizes of its config.json"),
            Assumption(what=hardware.name, value=rates, source="data sheet"),
            Assumption(what="generation", value=generation, source=self._generator(config).source),
            Assumption(what="training", value=training, source="fitted MFU of published trainers"),
        )

    def _check_layout(self, config: RunConfig) -> None:
        shape, trainer, generator = self.shape, config.training.parallel.tensor, generator_gpus(config)
        heads = f"{shape.heads} heads, {shape.kv_heads} of keys and values"
        divisor = f"a number that divides {shape.name}'s {heads}, and {shape.intermediate} features"
        if not self.allows_trainer_tensor(trainer):
            expected = "1, because ranks don't divide experts" if shape.experts else divisor
            raise InputError(f"training.parallel.tensor is {trainer}; expected {expected}")
        if not self.allows_generator_tensor(generator):
            raise InputError(f"generation.engine_args.tensor_parallel_size is {generator}; expected {divisor}")

    def _turns(self, config: RunConfig, setup: TrainerSetup) -> tuple[float, float]:
        """Seconds per step in which trainer and generators that share GPUs move their memory to the CPU and back."""
        if not config.placement.colocated:
            return 0.0, 0.0
        rate = self.hardware.host_copy * self.constants.host_copy_share
        # Weights and two moments there and back; gradients are dropped.
        trainer = 2 * 3 * self.shape.parameters * BYTES[setup.dtype] / setup.gpus / rate
        generator = 2 * self.shape.parameters * BYTES[_computed_in(config)] / generator_gpus(config) / rate
        return trainer, generator

    def _generator(self, config: RunConfig) -> Roofline | KernelTable:
        """By NVIDIA's tables where they are installed and have this model's kernels."""
        roofline = Roofline(
            shape=self.shape,
            hardware=self.hardware,
            tensor=generator_gpus(config),
            dtype=_computed_in(config),
            kv_dtype=_cached_in(config),
            assumptions=self.constants,
        )
        key = roofline.tensor, roofline.dtype, roofline.kv_dtype
        if key not in self._generators:
            self._generators[key] = with_tables(roofline)
        return self._generators[key]

    def _lengths(self, config: RunConfig) -> GivenLengthsConfig:
        if self.given is not None:
            return self.given
        mean = max(1.0, _MEAN_SHARE * config.generation.max_new_tokens)
        return GivenLengthsConfig(mean=mean, sigma=_SIGMA, prompt=_PROMPT_TOKENS)


def _computed_in(config: RunConfig) -> str:
    quantization = config.generation.engine_args.get("quantization")
    if quantization is None:
        return config.generation_dtype
    if "fp8" in str(quantization):
        return "fp8"
    raise InputError(f'generation.engine_args.quantization is "{quantization}"; a plan knows fp8 alone, or none')


def _cached_in(config: RunConfig) -> str:
    cache = config.generation.engine_args.get("kv_cache_dtype", "auto")
    return "fp8" if "fp8" in str(cache) else config.generation_dtype
