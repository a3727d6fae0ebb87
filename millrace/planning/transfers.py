"""Data that leaves the GPUs: new versions for generators, checkpoints, streams; and the cost of the trainer's failures.

              trainer stands still            generators continue                    a generator stands still
    direct    its shards ─► CPU's memory      sums, the model over gloo, sums        its share ─► GPU
    shm       all gathered ─► shared memory   hash                                   the same
    store     as shm                          hash, write, read and verify           the same

Before it hands a version over, the trainer also computes log π of a few tokens, for which FSDP gathers all weights.
"""

import math
from typing import NamedTuple

from configs.schema import RunConfig
from millrace.planning.hardware import HOST_COPY_SHARE, Hardware, all_gather_seconds
from millrace.planning.models import BYTES, ModelShape
from millrace.planning.training import TRAINED_BYTES, trained_parameters, trainer_gpus

_SOCKET_RATE, _HASH_RATE, _WRITE_RATE, _READ_RATE = 1e9, 20e9, 0.4e9, 0.7e9
"""Bytes per second of a process: by gloo over TCP, as `direct` sends; hashed in memory; weights written to a run's
store; read from there and verified. Measured on two cores (docs/benchmarks.md, Weights)."""
_POLL_SECONDS = 2e-3
"""How long a finished push waits until a generator looks for it."""
_GPU_MTBF = 1.8e8
"""Mean time between failures that end a job, per GPU, seconds: 50,000 hours. Llama 3 (arXiv 2407.21783, §3.3.4) had 419
unexpected interruptions in 54 days on 16,384 H100, one in 50,700 hours of a GPU."""
_RESTART_SECONDS = 300.0
"""From a failure until a trainer has loaded its checkpoint on whole GPUs: a guess."""
_ROLLOUT_BYTES = 776
"""Bytes of a rollout's columns besides its tokens. A response token has its id, log μ, log π and whether it has
loss."""
_DAY = 86_400


class SyncSeconds(NamedTuple):
    """Times of one version."""

    handover: float
    """How long the trainer stands still."""
    push: float
    """From then until a generator may take the version."""
    pause: float
    """How long a generator stands still to load it."""


class Upkeep(NamedTuple):
    """Bytes that a campaign stores, and the cost of its trainer's failures."""

    bytes_per_day: float
    """Before older checkpoints are removed."""
    checkpoint_bytes: float
    mtbf: float
    """Mean seconds between two failures of the trainer; a GPU that fails ends it."""
    share_lost: float
    """Share of all time that these cost."""


def sync_seconds(
    shape: ModelShape, config: RunConfig, hardware: Hardware, *, generator_gpus: int, dtype: str
) -> SyncSeconds:
    """Returns the times of a version in `dtype` for generators that receive the model whole."""
    nbytes = float(shape.parameters * BYTES[dtype])
    host_copy = hardware.host_copy * HOST_COPY_SHARE
    pause = nbytes / generator_gpus / host_copy
    verify = nbytes / _HASH_RATE + _POLL_SECONDS
    parallel, gpus = config.training.parallel, trainer_gpus(config)
    per_host = max(1, hardware.gpus_per_host // parallel.tensor)
    probe = all_gather_seconds(
        shape.parameters * BYTES["bfloat16"] / parallel.tensor, hardware, parallel.data, per_host
    )
    if config.weights.transport == "direct":
        shard = nbytes / gpus
        return SyncSeconds(probe + shard / host_copy, shard / _HASH_RATE + nbytes / _SOCKET_RATE + verify, pause)
    trained = float(shape.parameters * TRAINED_BYTES)
    gathered = all_gather_seconds(trained, hardware, gpus, hardware.gpus_per_host)
    stored = nbytes / _WRITE_RATE + nbytes / _READ_RATE if config.weights.transport == "store" else 0.0
    return SyncSeconds(probe + gathered + nbytes / host_copy, stored + verify, pause)


def checkpoint_bytes(shape: ModelShape, config: RunConfig) -> float:
    """Counts the bytes of the trained weights and their two moments."""
    return float(trained_parameters(shape, config) * 3 * TRAINED_BYTES)


def checkpoint_seconds(shape: ModelShape, config: RunConfig, hardware: Hardware) -> float:
    """How long the trainer stands still for a checkpoint: each rank copies its shards to the CPU's memory."""
    return checkpoint_bytes(shape, config) / trainer_gpus(config) / (hardware.host_copy * HOST_COPY_SHARE)


def find_upkeep(
    shape: ModelShape, config: RunConfig, *, prompt_tokens: float, response_tokens: float, step_seconds: float
) -> Upkeep:
    """Returns the upkeep of a campaign with prompts and responses of these mean lengths."""
    training, checkpoint = config.training, checkpoint_bytes(shape, config)
    rollouts = training.groups_per_step * config.generation.group_size
    per_step = rollouts * rollout_bytes(prompt_tokens, response_tokens) + checkpoint / training.checkpoint_every
    mtbf = _GPU_MTBF / trainer_gpus(config)
    lost = share_lost(step_seconds * training.checkpoint_every, mtbf, _RESTART_SECONDS)
    return Upkeep(per_step * _DAY / step_seconds, checkpoint, mtbf, lost)


def rollout_bytes(prompt_tokens: float, response_tokens: float) -> float:
    """Bytes of one rollout in all streams: trajectory, score, account and log π. Nothing is compressed."""
    return _ROLLOUT_BYTES + 4 * prompt_tokens + 13 * response_tokens


def share_lost(work: float, mtbf: float, restart: float) -> float:
    """Returns the share of all time that failures take: restarts, and the steps since the last checkpoint.

    `work`: seconds of steps between two checkpoints. Failures are a Poisson process. To get through w seconds without
    one takes (mtbf + restart) · (exp(w / mtbf) − 1) seconds on average, if each failure begins them again.
    """
    return 1 - work / ((mtbf + restart) * math.expm1(work / mtbf))
