"""A machine of a few round numbers, for plans that a test can work out by hand."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from configs.schema import RunConfig
from millrace.errors import InputError
from millrace.planning.durations import Costs, Lengths, log_normal_lengths
from millrace.planning.hardware import GIB
from millrace.planning.memory import MemoryReport

TOKENS = 100
"""Of every response."""
TRAIN_TOKEN = 1e-3
"""GPU-seconds of a token that is trained."""
DECODE = 0.01
"""GPU-seconds of a decode step, however many requests are in it."""

EXACT = Costs(
    decode=lambda requests, tokens: 0.01,
    prefill=lambda tokens: 0.0,
    score=0.0,
    train=lambda tokens, rollouts: 1.0,
    handover=0.0,
    push=0.0,
    pause=0.0,
    checkpoint=0.0,
)
"""A token takes 10 ms, a step 1 s, and nothing else takes any time."""


@dataclass(frozen=True, kw_only=True)
class SmallMachine:
    """Training and decoding divide evenly among their GPUs; nothing else takes time, unless `extra` says so.

    A trainer rank needs `trainer_gib` ÷ ranks, a GPU of a generator `generator_gib` ÷ its GPUs.
    """

    trainer_gib: float = 1.0
    generator_gib: float = 1.0
    extra: dict[str, float] = field(default_factory=dict)

    name = "a model on a small machine"

    def costs(self, config: RunConfig) -> Costs:
        parallel = config.training.parallel
        ranks = parallel.data * parallel.tensor
        tensor = config.generation.engine_args.get("tensor_parallel_size", 1)
        costs = replace(
            EXACT,
            decode=lambda running, tokens: DECODE / tensor,
            train=lambda tokens, rollouts: TRAIN_TOKEN * tokens / ranks,
        )
        return replace(costs, **self.extra)

    def lengths(self, config: RunConfig) -> Lengths:
        size = config.generation.group_size
        return log_normal_lengths(prompt=1, mean=TOKENS, sigma=0.0, max_tokens=TOKENS, group_size=size)

    def memory(self, config: RunConfig) -> MemoryReport:
        parallel, tensor = config.training.parallel, config.generation.engine_args.get("tensor_parallel_size", 1)
        if parallel.tensor > 2 or tensor > 4:
            raise InputError("too many tensor ranks")
        checkpointing = 0.5 if config.training.activation_checkpointing else 1.0
        return MemoryReport(
            trainer=checkpointing * self.trainer_gib * GIB / (parallel.data * parallel.tensor),
            generator=self.generator_gib * GIB / tensor,
            hardware_name="a GPU",
            capacity=80 * GIB,
        )

    def assumptions(self, config: RunConfig) -> Mapping[str, str]:
        return {"numbers": "round (this test)"}
