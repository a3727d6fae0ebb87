"""Which transport brings weights to the generators when the config says `auto`, and why.

vLLM, trainer on GPUs ─► colocated on one GPU: ipc      otherwise: nccl_m2n (nccl where its limits do not allow it)
anything else         ─► one host: shm                  several hosts: direct, or store without a network
"""

from typing import TYPE_CHECKING, Literal, NamedTuple

if TYPE_CHECKING:
    from configs.schema import RunConfig

Transport = Literal["auto", "shm", "direct", "store", "ipc", "nccl", "nccl_m2n", "gloo"]

LIVE = frozenset({"ipc", "nccl", "nccl_m2n", "gloo"})
"""Weights go from the trainer's ranks straight into vLLM's workers, by vLLM's engine of this name."""
SHARDED = LIVE | {"direct"}
"""Each trainer rank sends its shards, led by sync_weights."""


class Choice(NamedTuple):
    """A transport, and the reason for it as a clause."""

    transport: Transport
    reason: str


def choose_transport(config: "RunConfig") -> Choice:
    """Returns the transport that `weights.transport` stands for."""
    chosen, configured = _choose(config), config.weights.transport
    return chosen if configured in ("auto", chosen.transport) else Choice(configured, "as configured")


def one_gpu(config: "RunConfig") -> bool:
    """Whether the trainer has one rank, and the only generator one worker."""
    parallel = config.training.parallel
    return parallel.data * parallel.tensor == 1 == config.generation.replicas * vllm_workers(config)


def data_parallel(config: "RunConfig") -> bool:
    """Whether each generator is several of vLLM's data-parallel engines."""
    return int(config.generation.engine_args.get("data_parallel_size", 1)) > 1


def vllm_workers(config: "RunConfig") -> int:
    """Number of vLLM's workers per generator, a GPU each."""
    arguments = config.generation.engine_args
    return int(arguments.get("tensor_parallel_size", 1)) * int(arguments.get("pipeline_parallel_size", 1))


def _choose(config: "RunConfig") -> Choice:
    placement, training = config.placement, config.training
    pools = {placement.train.work_pool, placement.generate.work_pool} - {None}
    on_gpus = config.generation.engine == "vllm" and training.device == "cuda"
    if on_gpus and training.lora.rank is None and not data_parallel(config):
        if not placement.colocated and (not pools or placement.train.network is not None):
            return Choice("nccl_m2n", "trainer and vLLM have different GPUs")
        if placement.colocated and one_gpu(config) and not pools:
            return Choice("ipc", "trainer and vLLM share one GPU")
    if not pools:
        return Choice("shm", "all stages are on one host")
    if placement.train.network is None:
        return Choice("store", "stages may be on several hosts, and placement.train.network is null")
    return Choice("direct", "stages may be on several hosts")
