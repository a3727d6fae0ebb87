"""Rules about where stages run, on which devices, and how weights reach the generators."""

from collections.abc import Callable, Iterator, Sequence
from operator import attrgetter
from typing import TYPE_CHECKING

from configs.checks.rule import Rule
from configs.operation import LIVE, SHARDED, data_parallel, one_gpu

if TYPE_CHECKING:
    from configs.schema import RunConfig


def _pool_rules(
    stages: Sequence[str], keys: str, is_broken: Callable[["RunConfig"], bool], expected: str
) -> Iterator[Rule]:
    """Yield a rule for each of `stages`, broken if a work pool starts it and the config `is_broken`."""
    for stage in stages:
        pool = attrgetter(f"placement.{stage}.work_pool")
        yield Rule(keys.format(stage=stage), lambda c, pool=pool: pool(c) is not None and is_broken(c), expected)  # type: ignore[misc]


PLACEMENT_RULES = (
    # ---- hosts ----
    *_pool_rules(
        ("generate", "score", "teach", "train", "evaluate"),
        "storage.root placement.{stage}.work_pool",
        lambda c: c.storage.root.startswith("memory:"),
        "a root that other hosts can reach, such as s3://bucket/prefix or a shared folder",
    ),
    # Scorers, teachers and the evaluation read the store alone.
    *_pool_rules(
        ("generate", "train"),
        "weights.transport placement.{stage}.work_pool",
        lambda c: c.weights.transport == "shm",
        "direct or store, because generators and trainer may be on different hosts",
    ),
    Rule(
        "placement.train.work_pool placement.train.hosts",
        lambda c: c.placement.train.hosts > 1 and c.placement.train.work_pool is None,
        "a work pool, whose workers start the ranks",
    ),
    Rule(
        "placement.train.network placement.train.hosts",
        lambda c: c.placement.train.hosts > 1 and c.placement.train.network is None,
        "the network in which they reach each other, such as 10.0.0.0/24",
    ),
    Rule(
        "training.parallel.data placement.train.hosts",
        lambda c: c.training.parallel.data % c.placement.train.hosts != 0,
        "a multiple of the hosts, because each host has the same number of data ranks",
    ),
    Rule(
        "training.parallel.shard training.parallel.data",
        lambda c: c.training.parallel.data % (c.training.parallel.shard or 1) != 0,
        "a divisor of the data ranks, because each group of them holds the whole model",
    ),
    Rule(
        "placement.train.min_hosts placement.train.hosts",
        lambda c: c.placement.train.hosts > 1 and (c.placement.train.min_hosts or 0) > c.placement.train.hosts,
        "at most the number of hosts",
    ),
    Rule(
        "placement.colocated pipeline.mode",
        lambda c: c.placement.colocated and c.pipeline.mode != "sync",
        "sync, because in async mode trainer and generators never wait for each other",
    ),
    *_pool_rules(
        ("generate", "train"),
        "placement.{stage}.work_pool placement.colocated",
        lambda c: c.placement.colocated,
        "null, because jobs of a pool may be on different hosts",
    ),
    Rule(
        "placement.train.devices training.device",
        lambda c: c.placement.train.devices is not None and c.training.device == "cpu",
        "null, because the trainer uses no GPU, or the device cuda",
    ),
    Rule(
        "placement.generate.devices generation.engine",
        lambda c: c.placement.generate.devices is not None and c.generation.engine != "vllm",
        "null, because it generates on the CPU, or the engine vllm",
    ),
    Rule(
        "placement.generate.devices placement.train.devices placement.colocated",
        lambda c: (
            c.placement.colocated
            and None not in (c.placement.generate.devices, c.placement.train.devices)
            and c.placement.generate.devices != c.placement.train.devices
        ),
        "the same GPUs, or null for one of them, because trainer and generators take turns on the same",
    ),
    Rule(
        "placement.colocated generation.engine training.device",
        # transformers generates on the CPU. vLLM can only sleep on a GPU.
        lambda c: (
            c.placement.colocated
            and (c.generation.engine, c.training.device) not in {("transformers", "cpu"), ("vllm", "cuda")}
        ),
        "the engine vllm with cuda, or transformers with cpu, so that both use the same device",
    ),
    # ---- weights ----
    Rule(
        "weights.transport generation.engine",
        lambda c: c.weights.transport in LIVE and c.generation.engine != "vllm",
        "auto, because only vLLM receives weights in its workers",
    ),
    Rule(
        "weights.transport training.device",
        lambda c: c.weights.transport in LIVE and (c.weights.transport == "gloo") != (c.training.device == "cpu"),
        "gloo with a trainer on the CPU, or nccl_m2n, nccl or ipc with one on GPUs",
    ),
    Rule(
        "weights.transport generation.engine_args",
        lambda c: c.weights.transport in LIVE and data_parallel(c),
        "generation.replicas in place of data_parallel_size, or auto",
    ),
    Rule(
        "weights.transport placement.colocated",
        lambda c: (
            c.weights.transport in LIVE
            and not (
                c.placement.colocated and one_gpu(c) if c.weights.transport == "ipc" else not c.placement.colocated
            )
        ),
        "ipc if trainer and a single generator share one GPU; nccl allows one process per GPU",
    ),
    Rule(
        "weights.deadline_seconds supervision.hang_seconds",
        # A push that waits for a frozen generator reports no progress.
        lambda c: c.effective_weights.transport in SHARDED and c.weights.deadline_seconds >= c.supervision.hang_seconds,
        "a shorter deadline, or sync_weights would count as hung while it waits for a generator",
    ),
)

DEVICE_RULES = (
    *(
        Rule(
            f"placement.{stage}.devices scoring.reward scoring.device",
            lambda c, stage=stage: (  # type: ignore[misc]
                getattr(c.placement, stage).devices is not None
                and not (c.loads_scoring_model and c.scoring.device == "cuda")
            ),
            "null, because only a model that scorers load with the device cuda uses a GPU",
        )
        for stage in ("score", "evaluate")
    ),
    Rule(
        "placement.teach.devices",
        lambda c: c.placement.teach.devices is not None and all(each.device == "cpu" for each in c.teachers.values()),
        "null, because no teacher has the device cuda",
    ),
)
"""Rules about the whole run, which one source can't break."""
