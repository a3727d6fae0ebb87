"""Published runs of other systems: what their authors say of them, and what is assumed where they say nothing.

    NeMo-RL   docs/about/performance-summary.md (v0.4 for lengths, v0.5 for times) and the recipes that it names
    verl      docs/advance/one_step_off.md, docs/advance/fully_async.md and the scripts in their recipes

Lengths. NeMo-RL publishes mean sequence lengths: tokens per second and GPU give 110 to 130 tokens more, the prompt.
verl publishes the limit alone: 1,500 tokens on average are assumed, and σ = 1. For NeMo-RL σ = 0.6 is assumed.

What differs from Millrace's pipeline. NeMo-RL's 8B recipe lets all responses end before weights are replaced; here they
go on. Its pipeline parallelism is data parallelism here. verl's fully asynchronous trainer takes a quarter of a batch
at a time and lets generators be half a batch ahead: here two steps of half a batch are one of its steps, and the bound
is two of them, so as much is on its way.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.planner.workloads import costs_with_nccl, cut_lengths, gpu_config
from configs.schema import RunConfig
from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.hardware import hardware_named
from millrace.planning.costs.known_models import model_named
from millrace.planning.simulation.lengths import LogNormalLengths
from millrace.planning.simulation.outcome import Outcome
from millrace.planning.simulation.simulate import simulate

_STEPS, _WARMUP = 10, 3
_VERL_MEAN, _VERL_SIGMA, _VERL_PROMPT = 1500, 1.0, 128


@dataclass(frozen=True, kw_only=True)
class Published:
    """One row of a table of theirs."""

    system: str
    name: str
    seconds: float
    """Of a step, as published."""
    model: str
    hardware: str
    config: RunConfig
    lengths: LogNormalLengths
    steps_in_one: int = 1
    """Steps of `config` that are one of theirs."""
    phases: tuple[float, float] | None = None
    """Seconds of generation, and of training with log π before; where they publish both."""

    def outcome(self, mfu: float) -> Outcome:
        """What is predicted. `mfu`: share of the peak that trainers of this system reach."""
        shape, hardware = model_named(self.model), hardware_named(self.hardware)
        costs = costs_with_nccl(self.config, shape, hardware, replace(DEFAULTS, mfu=mfu))
        return simulate(self.config, costs, self.lengths, steps=_STEPS, warmup=_WARMUP)

    def predicted(self, mfu: float) -> float:
        """Seconds per step of theirs."""
        return self.outcome(mfu).step_seconds * self.steps_in_one


def _nemo_rl(
    name: str,
    seconds: float,
    *,
    model: str,
    gpus: tuple[int, int],
    tensor: tuple[int, int],
    mean: int,
    prompt: int,
    bound: int | None,
) -> Published:
    """Four optimizer steps on 64 prompts × 32 responses, log π of the policy and of a reference before."""
    limit = 4096 - prompt
    config = gpu_config(
        gpus=gpus, tensor=tensor, groups=64, group_size=32, max_tokens=limit, bound=bound, minibatches=4, reference=True
    )
    lengths = cut_lengths(prompt=prompt, mean=mean, sigma=0.6, limit=limit, group_size=32)
    return Published(
        system="NeMo-RL", name=name, seconds=seconds, model=model, hardware="h100", config=config, lengths=lengths
    )


def _verl(
    name: str,
    seconds: float,
    *,
    gpus: tuple[int, int],
    tensor: int,
    group_size: int,
    limit: int,
    bound: int | None,
    halves: bool = False,
    phases: tuple[float, float] | None = None,
) -> Published:
    """512 prompts in 16 minibatches, log π of the policy before; `halves`: fully asynchronous."""
    config = gpu_config(
        gpus=gpus,
        tensor=(1, tensor),
        groups=256 if halves else 512,
        group_size=group_size,
        max_tokens=limit,
        bound=bound,
        # Fully asynchronous, verl takes log π from the generators: only one pass over the batch.
        minibatches=1 if halves else 16,
    )
    lengths = cut_lengths(prompt=_VERL_PROMPT, mean=_VERL_MEAN, sigma=_VERL_SIGMA, limit=limit, group_size=group_size)
    return Published(
        system="verl",
        name=name,
        seconds=seconds,
        model="qwen2.5-7b",
        hardware="h20",
        config=config,
        lengths=lengths,
        steps_in_one=2 if halves else 1,
        phases=phases,
    )


def _verl_pair(gpus: int, sync: float, phases: tuple[float, float], fully: float) -> tuple[Published, Published]:
    """The same number of GPUs, shared and divided."""
    half = gpus // 2
    how: dict[str, Any] = {"tensor": 4, "group_size": 16, "limit": 28_672}
    return (
        _verl(f"7B, {gpus} GPUs, sync", sync, gpus=(gpus, gpus), bound=None, phases=phases, **how),
        _verl(f"7B, {half} + {half} GPUs, fully async", fully, gpus=(half, half), bound=2, halves=True, **how),
    )


def published_runs() -> tuple[Published, ...]:
    """In the order of their tables."""
    small: dict[str, Any] = {"model": "llama-8b", "tensor": (1, 1), "prompt": 130}
    large: dict[str, Any] = {"model": "qwen3-32b", "tensor": (4, 4), "prompt": 110}
    older: dict[str, Any] = {"tensor": 2, "group_size": 12, "limit": 20_480}
    return (
        _nemo_rl("8B, 16 GPUs, sync", 92.8, gpus=(16, 16), mean=1060, bound=None, **small),
        _nemo_rl("8B, 8 + 8 GPUs, 1 off", 64.8, gpus=(8, 8), mean=1129, bound=1, **small),
        _nemo_rl("32B, 32 GPUs, sync", 376.0, gpus=(32, 32), mean=3206, bound=None, **large),
        _nemo_rl("32B, 32 + 32 GPUs, 1 off", 200.0, gpus=(32, 32), mean=3207, bound=1, **large),
        *_verl_pair(32, 790.1, (357.4, 377.5), 294.8),
        *_verl_pair(64, 365.3, (150.7, 203.7), 189.3),
        *_verl_pair(128, 356.3, (177.9, 167.7), 150.6),
        _verl("7B, 16 GPUs, sync", 749.0, gpus=(16, 16), bound=None, phases=(321.0, 374.0), **older),
        _verl("7B, 12 + 4 GPUs, 1 off", 520.0, gpus=(12, 4), bound=1, **older),
    )


def fitted_mfu(runs: Sequence[Published]) -> float:
    """The MFU with which the logarithms of predicted ÷ published of all these runs have the least squares."""
    low, high = math.log(0.05), math.log(1.0)
    for _ in range(9):
        third = (high - low) / 3
        left, right = low + third, high - third
        low, high = (low, right) if _squares(runs, left) < _squares(runs, right) else (left, high)
    return math.exp((low + high) / 2)


def _squares(runs: Sequence[Published], log_mfu: float) -> float:
    return sum(math.log(run.predicted(math.exp(log_mfu)) / run.seconds) ** 2 for run in runs)
