"""How long a new version takes from the trainer to a generator, by transport.

              trainer stands still            generators go on                     a generator stands still
    direct    its shards ─► CPU's memory      sums, the plan's bytes, sums         its share ─► GPU
    shm       all gathered ─► shared memory   hash                                 the same
    store     as shm                          hash, write, read and verify         the same

Before it hands a version over, the trainer also computes log π of a few tokens, for which FSDP gathers all weights.
"""

from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.links import all_gather_seconds
from millrace.planning.costs.model_shape import BYTES, ModelShape, tensor_dims
from millrace.weights.direct.exchange import BUCKET_BYTES
from millrace.weights.transfer.generator_layouts import vllm_layout
from millrace.weights.transfer.plan import TransferPlan, plan_transfer
from millrace.weights.transfer.trainer_layouts import fsdp_layout


@dataclass(frozen=True, slots=True)
class SyncSeconds:
    """Of one version."""

    handover: float
    """How long the trainer stands still."""
    push: float
    """From then until a generator may take the version."""
    pause: float
    """How long a generator stands still to load it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SyncSetup:
    """Who sends to whom."""

    data: int
    """The trainer's FSDP2 ranks."""
    tensor: int
    """Its tensor ranks."""
    generators: int
    workers: int
    """GPUs of each generator."""
    dtype: str = "bfloat16"
    """Number format of what is handed over."""
    trainer_dtype: str = "float32"
    """That of the trainer's weights."""


def sync_seconds(
    transport: str, shape: ModelShape, setup: SyncSetup, hardware: Hardware, assumptions: Assumptions
) -> SyncSeconds:
    """Of `shm`, `direct` or `store` as they are today: `direct` goes through the CPU's memory, and a generator receives
    the model whole."""
    nbytes = float(shape.parameters * BYTES[setup.dtype])
    host_copy = hardware.host_copy * assumptions.host_copy_share
    pause = nbytes / setup.workers / host_copy
    gpus, verify = setup.data * setup.tensor, nbytes / assumptions.hash_rate + assumptions.poll_seconds
    probe = all_gather_seconds(
        shape.parameters * BYTES["bfloat16"] / setup.tensor,
        hardware,
        setup.data,
        max(1, hardware.gpus_per_host // setup.tensor),
        assumptions,
    )
    if transport == "direct":
        travel = _direct_seconds(shape, setup, assumptions)
        sums = nbytes / gpus / assumptions.hash_rate
        return SyncSeconds(probe + nbytes / gpus / host_copy, sums + travel + verify, pause)
    gathered = all_gather_seconds(
        float(shape.parameters * BYTES[setup.trainer_dtype]), hardware, gpus, hardware.gpus_per_host, assumptions
    )
    stored = nbytes / assumptions.store_write + nbytes / assumptions.store_read if transport == "store" else 0.0
    return SyncSeconds(probe + gathered + nbytes / host_copy, stored + verify, pause)


@lru_cache(maxsize=1024)
def _direct_seconds(shape: ModelShape, setup: SyncSetup, assumptions: Assumptions) -> float:
    """Cached, because a large plan takes half a second and a search asks for the same one again."""
    plan = push_plan(
        shape, data=setup.data, tensor=setup.tensor, generators=setup.generators, workers=1, dtype=setup.dtype
    )
    return push_seconds(plan, assumptions.socket_rate, message_us=assumptions.message_us, copy_us=assumptions.copy_us)


def push_plan(
    shape: ModelShape,
    *,
    data: int,
    tensor: int,
    generators: int,
    workers: int,
    dtype: str,
    bucket_bytes: int = BUCKET_BYTES,
) -> TransferPlan:
    """The plan of a push from data × tensor trainer ranks to generators of so many workers by vLLM's layout.

    `dtype` is one that torch has. Raises InputError for a layout that can't be.
    """
    tensors = shape.tensors(dtype)
    source = fsdp_layout(tensors, data=data, tensor=tensor, tensor_dims=tensor_dims(tensors))
    generator = vllm_layout(tensors, tensor=workers, num_heads=shape.heads, num_kv_heads=shape.kv_heads)
    return plan_transfer(source, [generator] * generators, bucket_bytes=bucket_bytes)


def push_seconds(plan: TransferPlan, rate: float, *, message_us: float, copy_us: float) -> float:
    """How long a push takes if every rank carries `rate` bytes per second in each direction.

    Each message costs `message_us` microseconds besides its bytes. Each copy of a region into a bucket or out of it
    costs `copy_us`, while the other bucket travels.
    """
    return max(plan.span / rate + most_messages(plan) * message_us * 1e-6, most_copies(plan) * copy_us * 1e-6)


def most_messages(plan: TransferPlan) -> int:
    """Of the busiest rank, if all messages are full but each pair's last."""
    messages = np.concatenate([-(-family.sent // plan.bucket_bytes) for family in plan.families], axis=1)
    return int(max(messages.sum(axis=0).max(), messages.sum(axis=1).max()))


def most_copies(plan: TransferPlan) -> int:
    """Of the busiest worker, or of a trainer rank on average."""
    sends = sum(len(family.chains) * int(family.num_regions.sum()) for family in plan.families)
    return max(sends // plan.source.size, *(int(family.num_regions.max()) for family in plan.families))
