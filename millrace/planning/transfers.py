"""What leaves the GPUs: new versions for generators, checkpoints, streams; and what a failure of the trainer costs.

              trainer stands still            generators continue                    a generator stands still
    direct    its shards ─► CPU's memory      sums, the model over gloo, sums        its share ─► GPU
    shm       all gathered ─► shared memory   hash                                   the same
    store     as shm                          hash, write, read and verify           the same

Before it hands a version over, the trainer also computes log π of a few tokens, for which FSDP gathers all weights.
"""

import math
from dataclasses import dataclass

import pyarrow as pa

from millrace.planning.hardware import DEFAULTS, Assumptions, Hardware, all_gather_seconds
from millrace.planning.models import BYTES, ModelShape
from millrace.planning.training import TrainerSetup, trained_parameters
from storage.schema import CONSUMED, SCORE, TRAINER_LOGPROBS, TRAJECTORY

_PER_RESPONSE_TOKEN = ("response_tokens", "rollout_logprobs", "loss_mask", "trainer_logprobs")
_TEXT = 32
"""Bytes of a short text or list: ids, answers, spans."""
_DAY = 86_400


@dataclass(frozen=True, slots=True)
class SyncSeconds:
    """Times of one version."""

    handover: float
    """How long the trainer stands still."""
    push: float
    """From then until a generator may take the version."""
    pause: float
    """How long a generator stands still to load it."""


def sync_seconds(
    transport: str,
    shape: ModelShape,
    setup: TrainerSetup,
    hardware: Hardware,
    assumptions: Assumptions,
    *,
    workers: int,
    dtype: str,
) -> SyncSeconds:
    """Returns the times of a version in `dtype` for generators of so many GPUs each, which receive the model whole."""
    nbytes = float(shape.parameters * BYTES[dtype])
    host_copy = hardware.host_copy * assumptions.host_copy_share
    pause = nbytes / workers / host_copy
    verify = nbytes / assumptions.hash_rate + assumptions.poll_seconds
    per_host = max(1, hardware.gpus_per_host // setup.tensor)
    probed = shape.parameters * BYTES["bfloat16"] / setup.tensor
    probe = all_gather_seconds(probed, hardware, setup.data, per_host, assumptions)
    if transport == "direct":
        own = nbytes / setup.gpus
        travel = own / assumptions.hash_rate + nbytes / assumptions.socket_rate
        return SyncSeconds(probe + own / host_copy, travel + verify, pause)
    trained = float(shape.parameters * BYTES[setup.dtype])
    gathered = all_gather_seconds(trained, hardware, setup.gpus, hardware.gpus_per_host, assumptions)
    stored = nbytes / assumptions.store_write + nbytes / assumptions.store_read if transport == "store" else 0.0
    return SyncSeconds(probe + gathered + nbytes / host_copy, stored + verify, pause)


def checkpoint_bytes(shape: ModelShape, setup: TrainerSetup) -> float:
    """Bytes of the trained weights and their two moments, in the weights' format."""
    return float(trained_parameters(shape, setup) * 3 * BYTES[setup.dtype])


def checkpoint_seconds(shape: ModelShape, setup: TrainerSetup, hardware: Hardware, assumptions: Assumptions) -> float:
    """How long the trainer stands still for a checkpoint: each rank copies its shards to the CPU's memory."""
    own = checkpoint_bytes(shape, setup) / setup.gpus
    return own / (hardware.host_copy * assumptions.host_copy_share)


def rollout_bytes(prompt_tokens: float, response_tokens: float) -> float:
    """Bytes of one rollout in all streams: trajectory, score, account and log π. Nothing is compressed."""
    fields = [column for schema in (TRAJECTORY, SCORE, CONSUMED, TRAINER_LOGPROBS) for column in schema]
    return sum(_field_bytes(column, prompt_tokens, response_tokens) for column in fields)


def bytes_per_day(
    rollout: float, *, rollouts_per_step: int, checkpoint: float, checkpoint_every: int, step_seconds: float
) -> float:
    """Bytes that a campaign with steps of so many seconds writes, before older checkpoints are removed."""
    return (rollout * rollouts_per_step + checkpoint / checkpoint_every) * _DAY / step_seconds


def _field_bytes(column: pa.Field, prompt_tokens: float, response_tokens: float) -> float:
    kind = column.type
    if column.name == "prompt_tokens" or column.name in _PER_RESPONSE_TOKEN:
        tokens = prompt_tokens if column.name == "prompt_tokens" else response_tokens
        return 4 + tokens * float(kind.value_type.bit_width) / 8
    if pa.types.is_string(kind) or pa.types.is_list(kind):
        return 4.0 + _TEXT
    return float(kind.bit_width) / 8


def trainer_mtbf(gpus: int, assumptions: Assumptions = DEFAULTS) -> float:
    """Mean seconds between two failures of a trainer with so many GPUs; one that fails ends it."""
    return assumptions.gpu_mtbf / gpus


def share_lost(step_seconds: float, checkpoint_every: int, mtbf: float, restart: float) -> float:
    """Share of all time that a trainer's failures take: restarts, and the steps since the last checkpoint.

    Failures are a Poisson process. To get through w seconds of steps without one takes (mtbf + restart) ·
    (exp(w / mtbf) − 1) seconds on average, if each failure begins them again.
    """
    work = step_seconds * checkpoint_every
    return 1 - work / ((mtbf + restart) * math.expm1(work / mtbf))
