"""A machine of a few round numbers, for plans that a test can work out by hand."""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.campaign import MemoryReport, check_memory
from millrace.planning.costs.hardware import HARDWARE
from millrace.planning.costs.known_models import MODELS
from millrace.planning.costs.storage import StoredBytes
from millrace.planning.search.machine import Assumption
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import Lengths, LogNormalLengths

from configs.schema import RunConfig

GIB = 2**30
TOKENS = 100
"""Of every response."""
TRAIN_TOKEN = 1e-3
"""GPU-seconds of a token that is trained."""
DECODE = 0.01
"""GPU-seconds of a decode step, however many requests are in it."""


@dataclass(frozen=True, kw_only=True)
class SmallMachine:
    """Training and decoding divide evenly among their GPUs; nothing else takes time, unless `costs_besides` says so.

    A trainer rank needs `trainer_gib` ÷ ranks, a GPU of a generator `generator_gib` ÷ its GPUs.
    """

    trainer_gib: float = 1.0
    generator_gib: float = 1.0
    capacity_gib: float = 80.0
    besides: dict[str, float] = field(default_factory=dict)

    name = "a model on a small machine"

    def allows_trainer_tensor(self, size: int) -> bool:
        return size <= 2

    def allows_generator_tensor(self, size: int) -> bool:
        return size <= 4

    def costs(self, config: RunConfig) -> Costs:
        parallel = config.training.parallel
        ranks = parallel.data * parallel.tensor
        tensor = config.generation.engine_args.get("tensor_parallel_size", 1)
        found = Costs(
            decode=lambda running, tokens: DECODE / tensor,
            prefill=lambda tokens: 0.0,
            score=0.0,
            train=lambda tokens, rollouts: TRAIN_TOKEN * tokens / ranks,
            handover=0.0,
            push=0.0,
            pause=0.0,
            checkpoint=0.0,
        )
        return replace(found, **self.besides)

    def lengths(self, config: RunConfig) -> Lengths:
        return LogNormalLengths(
            prompt_tokens=1, mean_tokens=TOKENS, sigma=0.0, max_tokens=TOKENS, group_size=config.generation.group_size
        )

    def memory(self, config: RunConfig) -> MemoryReport:
        found = check_memory(config, MODELS["llama-8b"], HARDWARE["h100"], self.lengths(config), assumptions=DEFAULTS)
        parallel, tensor = config.training.parallel, config.generation.engine_args.get("tensor_parallel_size", 1)
        checkpointing = 0.5 if config.training.activation_checkpointing else 1.0
        trainer = checkpointing * self.trainer_gib * GIB / (parallel.data * parallel.tensor)
        generator = self.generator_gib * GIB / tensor
        short = [
            f"{what} needs {needed / GIB:.0f} GiB, {needed / GIB - self.capacity_gib:.0f} GiB too much"
            for what, needed in (("the trainer", trainer), ("a generator", generator))
            if needed > self.capacity_gib * GIB
        ]
        empty = {"gathered": 0.0, "activations": 0.0, "logits": 0.0, "reference": 0.0, "reserved": 0.0}
        return replace(
            found,
            trainer=replace(found.trainer, states=trainer, **empty),
            generator=replace(found.generator, weights=generator, cache=0.0, longest=0.0, reserved=0.0),
            sentence="; ".join(short) or None,
            capacity=self.capacity_gib * GIB,
        )

    def storage(self, config: RunConfig, step_seconds: float) -> StoredBytes | None:
        return None

    def assumptions(self, config: RunConfig) -> Sequence[Assumption]:
        return (Assumption(what="numbers", value="round", source="this test"),)
