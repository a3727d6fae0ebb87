"""How long a new version takes from the trainer to a generator, by transport.

              trainer stands still            generators go on                     a generator stands still
    direct    its shards ─► CPU's memory      sums, all bytes, sums                its share ─► GPU
    shm       all gathered ─► shared memory   hash                                 the same
    store     as shm                          hash, write, read and verify         the same

Before it hands a version over, the trainer also computes log π of a few tokens, for which FSDP gathers all weights.
"""

from dataclasses import dataclass

from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.links import all_gather_seconds
from millrace.planning.costs.model_shape import BYTES, ModelShape
from millrace.weights.direct.layout import MESSAGE_BYTES


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


def _direct_seconds(shape: ModelShape, setup: SyncSetup, assumptions: Assumptions) -> float:
    """From the trainer's ranks to the last generator: each hands a message on while it receives the next one."""
    nbytes = shape.parameters * BYTES[setup.dtype]
    filling = (setup.generators - 1) * min(MESSAGE_BYTES, nbytes)
    messages = len(shape.tensors()) * setup.data * setup.tensor + nbytes // MESSAGE_BYTES
    return (nbytes + filling) / assumptions.socket_rate + messages * assumptions.message_us * 1e-6
