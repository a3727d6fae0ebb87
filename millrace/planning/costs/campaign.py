"""A config, a model's shape and hardware become what a campaign costs and what memory it needs.

This is the only module of the room that knows the config. It assumes that trainer and generators run on GPUs, each of
the hardware's kind, and generators as vLLM does, whatever device and engine the config names.
"""

from dataclasses import dataclass, replace
from pathlib import Path

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.costs.assumptions import DEFAULTS, Assumptions
from millrace.planning.costs.generation import GenerationModel, Roofline
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.memory import (
    GeneratorMemory,
    TrainerMemory,
    cache_places,
    generator_memory,
    shortfall,
    trainer_memory,
)
from millrace.planning.costs.model_shape import BYTES, ModelShape, shape_of_bootstrap, shape_of_folder
from millrace.planning.costs.storage import checkpoint_seconds
from millrace.planning.costs.training import TrainerSetup, mean_context, step_seconds
from millrace.planning.costs.weight_sync import SyncSetup, sync_seconds
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths
from millrace.preflight.model import check_layout
from millrace.weights.transfer.generator_layouts import vllm_layout

_SAMPLED_GROUPS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Whether a config fits into the memory of its GPUs."""

    trainer: TrainerMemory
    generator: GeneratorMemory
    places: int
    """Of a generator's places, in requests, those that its key-value cache has room for at average lengths."""
    sentence: str | None
    """What does not fit, and by how much; None if all fits."""
    capacity: float
    """Bytes of a GPU."""

    @property
    def fits(self) -> bool:
        """Whether trainer and generators both do."""
        return self.sentence is None

    @property
    def trainer_fits(self) -> bool:
        """Whether the trainer does."""
        return self.trainer.total <= self.capacity

    @property
    def generator_fits(self) -> bool:
        """Whether a generator does."""
        return self.generator.total <= self.capacity


def shape_of_model(config: RunConfig) -> ModelShape:
    """Sizes of the config's model. Raises ModelFolderError if its folder does not say them."""
    path = config.model.path
    return shape_of_bootstrap(config.model.bootstrap) if path is None else shape_of_folder(Path(path))


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
                f"generation.engine_args.{name} is {arguments[name]}; a plan knows tensor_parallel_size alone"
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


def check_layouts(config: RunConfig, shape: ModelShape) -> None:
    """Raises InputError if trainer or generators can't divide the model's layers as the config says."""
    parallel = config.training.parallel
    if shape.experts:
        if parallel.tensor > 1:
            raise InputError(
                f"training.parallel.tensor is {parallel.tensor}, and layers of a mixture of experts can't be divided "
                "among tensor ranks; expected 1"
            )
        return
    sizes = {
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "intermediate_size": shape.intermediate,
    }
    check_layout(sizes, parallel, gpus=None)
    tensors = replace(shape, layers=1).tensors()
    vllm_layout(tensors, tensor=generator_gpus(config), num_heads=shape.heads, num_kv_heads=shape.kv_heads)


def trainer_hardware(config: RunConfig, hardware: Hardware) -> Hardware:
    """`hardware` with as many GPUs per host as the trainer has there, if the config says on how many hosts it is."""
    hosts = config.placement.train.hosts
    if hosts == 1:
        return hardware
    return replace(hardware, gpus_per_host=min(hardware.gpus_per_host, trainer_setup(config).gpus // hosts))


def roofline(
    config: RunConfig, shape: ModelShape, hardware: Hardware, *, assumptions: Assumptions = DEFAULTS
) -> Roofline:
    """A generator of the config."""
    return Roofline(
        shape=shape,
        hardware=hardware,
        tensor=generator_gpus(config),
        dtype=_computed_in(config),
        kv_dtype=_cached_in(config),
        assumptions=assumptions,
    )


def campaign_costs(
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    *,
    assumptions: Assumptions = DEFAULTS,
    generation: GenerationModel | None = None,
) -> Costs:
    """What each part of a campaign costs. `generation`: a generator of the config by other figures than the roofline's.

    Raises InputError for a layout that can't be.
    """
    check_layouts(config, shape)
    setup, own = trainer_setup(config), trainer_hardware(config, hardware)
    model = generation or roofline(config, shape, hardware, assumptions=assumptions)
    sync = sync_seconds(
        config.weights.transport,
        shape,
        SyncSetup(
            data=setup.data,
            tensor=setup.tensor,
            generators=config.generation.replicas,
            workers=generator_gpus(config),
            dtype=config.generation_dtype,
            trainer_dtype=setup.dtype,
        ),
        own,
        assumptions,
    )
    state_move, load = _turns(config, shape, setup, hardware, assumptions)

    def train(tokens: int, rollouts: int) -> float:
        context = mean_context(tokens, rollouts)
        return step_seconds(shape, setup, own, tokens=tokens, context=context, assumptions=assumptions)

    return Costs(
        decode=model.decode,
        prefill=model.prefill,
        score=assumptions.score_seconds / config.scoring.workers,
        train=train,
        handover=sync.handover,
        push=sync.push,
        pause=sync.pause + load,
        checkpoint=checkpoint_seconds(shape, setup, hardware, assumptions),
        overhead=assumptions.step_overhead + state_move,
    )


def check_memory(
    config: RunConfig,
    shape: ModelShape,
    hardware: Hardware,
    lengths: Lengths,
    *,
    assumptions: Assumptions = DEFAULTS,
) -> MemoryReport:
    """What trainer and generators need per GPU, and whether that fits."""
    generation = config.generation
    places = generation.groups_per_batch * generation.group_size
    prompt, running = _average_lengths(lengths)
    trainer = trainer_memory(shape, trainer_setup(config), assumptions)
    generator = generator_memory(
        shape,
        tensor=generator_gpus(config),
        dtype=_computed_in(config),
        kv_dtype=_cached_in(config),
        # Prefix caching keeps the prompt of a group once.
        cached_tokens=generation.groups_per_batch * prompt + places * running,
        longest_tokens=round(prompt) + generation.max_new_tokens,
        hardware=hardware,
        assumptions=assumptions,
        memory_share=generation.engine_args.get("gpu_memory_utilization"),
    )
    sentences = [
        sentence
        for what, needed in (("the trainer", trainer.total), ("a generator", generator.total))
        if (sentence := shortfall(what, needed, hardware)) is not None
    ]
    return MemoryReport(
        trainer=trainer,
        generator=generator,
        places=cache_places(generator, hardware, places),
        sentence="; ".join(sentences) or None,
        capacity=hardware.memory_bytes,
    )


def _average_lengths(lengths: Lengths) -> tuple[float, float]:
    """Mean tokens of a prompt, and of the responses in flight at any moment.

    That is E[L²] / 2 E[L] of responses of length L: long ones stay longer, and each is half done on average.
    """
    groups = [lengths.of_group(group) for group in range(_SAMPLED_GROUPS)]
    responses = [tokens for _, group in groups for tokens in group]
    prompt = sum(tokens for tokens, _ in groups) / len(groups)
    return prompt, sum(tokens**2 for tokens in responses) / (2 * sum(responses))


def _turns(
    config: RunConfig, shape: ModelShape, setup: TrainerSetup, hardware: Hardware, assumptions: Assumptions
) -> tuple[float, float]:
    """Seconds per step in which trainer and generators that share GPUs move their memory to the CPU and back."""
    if not config.placement.colocated:
        return 0.0, 0.0
    rate = hardware.host_copy * assumptions.host_copy_share
    # Weights and two moments there and back; gradients are dropped.
    trainer = 2 * 3 * shape.parameters * BYTES[setup.dtype] / setup.gpus / rate
    generator = 2 * shape.parameters * BYTES[_computed_in(config)] / generator_gpus(config) / rate
    return trainer, generator


def _computed_in(config: RunConfig) -> str:
    quantization = config.generation.engine_args.get("quantization")
    if quantization is None:
        return config.generation_dtype
    if "fp8" in str(quantization):
        return "fp8"
    raise InputError(f'generation.engine_args.quantization is "{quantization}"; a plan knows fp8 alone, or none')


def _cached_in(config: RunConfig) -> str:
    return (
        "fp8" if "fp8" in str(config.generation.engine_args.get("kv_cache_dtype", "auto")) else config.generation_dtype
    )
