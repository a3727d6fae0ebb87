"""What published measurements leave out, as assumptions: lengths, and the configs that stand for other systems."""

import math
from dataclasses import replace
from statistics import NormalDist

from configs.schema import RunConfig
from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.costs.campaign import campaign_costs
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.model_shape import BYTES, ModelShape
from millrace.planning.simulation.costs import Costs
from millrace.planning.simulation.lengths import LogNormalLengths

_NORMAL = NormalDist()


def cut_lengths(*, prompt: int, mean: float, sigma: float, limit: int, group_size: int) -> LogNormalLengths:
    """Log-normal lengths whose mean is `mean` after all are cut off at `limit`, tokens.

    Raises ValueError if no distribution has that mean.
    """
    if not 0 < mean < limit:
        raise ValueError(f"responses of at most {limit} tokens can't have {mean} on average")
    low, high = mean, mean * 1000.0
    for _ in range(100):
        middle = math.sqrt(low * high)
        low, high = (middle, high) if _cut_mean(middle, sigma, limit) < mean else (low, middle)
    return LogNormalLengths(prompt_tokens=prompt, mean_tokens=low, sigma=sigma, max_tokens=limit, group_size=group_size)


def _cut_mean(mean: float, sigma: float, limit: float) -> float:
    """E[min(X, limit)] of a log-normal X with this mean."""
    mu = math.log(mean) - sigma**2 / 2
    depth = (math.log(limit) - mu) / sigma
    return mean * _NORMAL.cdf(depth - sigma) + limit * (1 - _NORMAL.cdf(depth))


def gpu_config(
    *,
    gpus: tuple[int, int],
    tensor: tuple[int, int],
    groups: int,
    group_size: int,
    max_tokens: int,
    bound: int | None,
    minibatches: int = 1,
    reference: bool = False,
    quantization: str | None = None,
) -> RunConfig:
    """A config that stands for a published run.

    `gpus` and `tensor` are (trainer's, generators'); `tensor` of the generators is that of each. `bound` is the
    staleness bound, None for sync mode on GPUs that both share: then both have all of them.
    """
    arguments = {"tensor_parallel_size": tensor[1]} | ({} if quantization is None else {"quantization": quantization})
    values = {
        "pipeline": {"mode": "sync" if bound is None else "async"},
        "model": {"path": "published", "dtype": "bfloat16"},
        "generation": {
            "engine": "vllm",
            "engine_args": arguments,
            "replicas": gpus[1] // tensor[1],
            "group_size": group_size,
            "groups_per_batch": max(1, groups * tensor[1] // gpus[1]),
            "max_new_tokens": max_tokens,
        },
        "training": {
            "max_steps": 10**6,
            "groups_per_step": groups,
            "minibatches": minibatches,
            "device": "cuda",
            "parallel": {"data": gpus[0] // tensor[0], "tensor": tensor[0]},
            "activation_checkpointing": True,
            "max_tokens_per_microbatch": 32_768,
            "share_prefixes": False,
            "kl": {"coefficient": 0.01 if reference else 0.0},
        },
        "staleness": {"max_staleness": bound or 0, "too_old": "mask"},
        "placement": {"colocated": bound is None},
    }
    return RunConfig.model_validate(values)


def costs_with_nccl(config: RunConfig, shape: ModelShape, hardware: Hardware, assumptions: Assumptions) -> Costs:
    """What the config costs a system that sends weights from GPU to GPU.

    Each generator's GPU then receives its share over the network while it stands still, and nothing else takes time.
    """
    costs = campaign_costs(config, shape, hardware, assumptions=assumptions)
    workers = int(config.generation.engine_args["tensor_parallel_size"])
    received = shape.parameters * BYTES["bfloat16"] / workers / (hardware.network * assumptions.link_share)
    pause = received + (costs.pause if config.placement.colocated else 0.0)
    return replace(costs, score=0.0, handover=0.0, push=0.0, pause=pause, checkpoint=0.0)
