"""How long the trainer computes a step, and how long versions and checkpoints take to leave its GPUs.

    batch ─► updates ─► microbatches: on each rank  max( products,  FSDP's gathers and scatters )  + all-reduces of
                                                                                                     tensor ranks
         ─► forward passes alone: log π before the first of several updates, log π of the reference
         ─► AdamW

Products: forward 2 FLOPs per parameter and token, backward twice that; attention in addition. So 6 N per token. With
activation checkpointing a layer is computed forward once more, up to the input of a dense layer's last product: 7.5 N
instead of 8 N. The selective one repeats no product. The output layer takes 8 per parameter, because its logits are
computed once more (`millrace.training.logprobs`). `MFU` of the peak is reached. FSDP2 gathers a layer while the one
before computes, so the slower of the two counts. Tensor ranks wait for each all-reduce. Weights that are trained are in
float32, and so are their gradients and moments.

              trainer stands still            generators continue                    a generator stands still
    direct    its shards ─► CPU's memory      sums, the model over gloo, sums        its share ─► GPU
    shm       all gathered ─► shared memory   hash                                   the same
    store     as shm                          hash, write, read and verify           the same
    nccl      cast and copied on its GPU      sums                                   gather to rank 0, broadcast
    ipc       cast, copied to pinned memory   sums                                   through a buffer on the GPU

nccl_m2n counts as nccl: it needs a package that vLLM does not install, and does not divide every model.
LoRA adapters travel by `shm` and `store` instead of whole models; the others send merged shards.
"""

import math
from typing import NamedTuple

from configs.operation import LIVE
from configs.schema import RunConfig
from millrace.planning.hardware import (
    HOST_COPY_SHARE,
    LINK_SHARE,
    MEMORY_SHARE,
    Hardware,
    all_gather_seconds,
    all_reduce_seconds,
)
from millrace.planning.models import BYTES, ModelShape

MFU = 0.36
"""Share of the dense FLOP/s that the trainer's kernels reach while they wait for no other GPU. Trainers of dense models
on H100 reach 0.25 to 0.36 of all their time; collectives are computed separately."""
_MIXTURE_FACTOR = 0.5
"""Share of that which a mixture of experts reaches, whose products are small."""
_ADAMW_PASSES = 24
"""How often each trained number is read or written, or one of its kind: gradient, two moments, temporaries. torch's
AdamW does one operation after the other on all parameters; clipping the gradient is among them."""
TRAINED_BYTES = 4
"""Bytes of a trained weight, of its gradient and of each moment."""
_SOCKET_RATE, _HASH_RATE, _WRITE_RATE, _READ_RATE = 1e9, 20e9, 0.4e9, 0.7e9
"""Bytes per second of a process: by gloo over TCP, as `direct` sends; hashed in memory; weights written to a run's
store; read from there and verified. Measured on two cores (docs/benchmarks.md, Weights)."""
_POLL_SECONDS = 2e-3
"""How long a finished push waits until a generator looks for it."""


def trainer_gpus(config: RunConfig) -> int:
    """Returns the number of the trainer's GPUs: FSDP ranks × tensor ranks."""
    return config.training.parallel.data * config.training.parallel.tensor


def trained_parameters(shape: ModelShape, config: RunConfig) -> int:
    """Counts the parameters with a gradient."""
    training = config.training
    trained_layers = shape.layers - training.frozen_layers
    if training.lora.rank is not None:
        # Adapters are small, so as if every adapted layer were as wide as the model.
        return trained_layers * training.lora.rank * 2 * shape.hidden * len(training.lora.target_modules)
    if not training.frozen_layers:
        return shape.parameters
    # The embeddings are frozen with the first layers, and so is the output layer if it is the same tensor.
    return trained_layers * shape.layer_parameters + (0 if shape.tied else shape.output_parameters)


class Traffic(NamedTuple):
    """Traffic of a rank for a forward and a backward pass of one microbatch."""

    gathered: float
    """Whole weights that data ranks gather, bytes."""
    scattered: float
    """Whole gradients that data ranks sum, bytes; each keeps its part."""
    reductions: int
    """Hidden states that are summed over tensor ranks."""


def microbatch_traffic(shape: ModelShape, config: RunConfig) -> Traffic:
    """Returns the traffic of a microbatch of any size, as if there were several data and tensor ranks."""
    training = config.training
    # Tensor ranks gather their part of each layer.
    weights = shape.layers * shape.layer_parameters / training.parallel.tensor + shape.other_parameters
    trained = weights * trained_parameters(shape, config) / shape.parameters
    # A layer sums twice forward and twice backward; computed again, it ends before its last sum.
    backward = 3 if training.activation_checkpointing else 2
    return Traffic(
        gathered=2 * weights * BYTES[config.compute_dtype],
        scattered=trained * TRAINED_BYTES,
        reductions=2 * shape.layers + backward * (shape.layers - training.frozen_layers),
    )


def message_bytes(shape: ModelShape, config: RunConfig, tokens: float) -> float:
    """Returns the bytes of the hidden states of these tokens, which tensor ranks sum."""
    return tokens * shape.hidden * BYTES[config.compute_dtype]


def step_seconds(shape: ModelShape, config: RunConfig, hardware: Hardware, *, tokens: float, rollouts: int) -> float:
    """Returns the seconds of an optimizer step on `tokens` tokens, prompts included, of about equally long rollouts."""
    if tokens <= 0:
        return 0.0
    training, context = config.training, tokens / rollouts / 2
    flops, traffic = training_flops(shape, config, context), microbatch_traffic(shape, config)
    update = _pass_seconds(shape, config, hardware, tokens / training.minibatches, flops, traffic)
    adamw_bytes = trained_parameters(shape, config) / trainer_gpus(config) * TRAINED_BYTES * _ADAMW_PASSES
    updates = training.minibatches * training.epochs
    seconds = updates * (update + adamw_bytes / (hardware.memory_rate * MEMORY_SHARE))
    if training.optimizer_offload:
        # Two moments, there and back.
        moments = 2 * trained_parameters(shape, config) / trainer_gpus(config) * TRAINED_BYTES
        seconds += updates * 2 * moments / (hardware.host_copy * HOST_COPY_SHARE)
    if forward_passes := int(updates > 1) + int(training.kl.coefficient > 0):
        flops = shape.layers * _layer_flops(shape, context) + 2 * shape.output_parameters
        traffic = Traffic(gathered=traffic.gathered / 2, scattered=0.0, reductions=2 * shape.layers)
        forward = _pass_seconds(shape, config, hardware, tokens, flops, traffic)
        seconds += forward_passes * forward
    return seconds


def _pass_seconds(
    shape: ModelShape,
    config: RunConfig,
    hardware: Hardware,
    tokens: float,
    flops: float,
    traffic: Traffic,
) -> float:
    """`flops` per token; `traffic` of a microbatch."""
    data, tensor, dtype = config.training.parallel.data, config.training.parallel.tensor, config.compute_dtype
    # Every rank has as many microbatches, and at least one.
    count = max(1, math.ceil(tokens / (data * config.training.max_tokens_per_microbatch)))
    rank_tokens = tokens / data / count
    mfu = MFU * (_MIXTURE_FACTOR if shape.experts else 1.0)
    products = rank_tokens * flops / tensor / (hardware.flops[dtype] * mfu)
    moved = traffic.gathered + traffic.scattered
    gathers = all_gather_seconds(moved, hardware, data, max(1, hardware.gpus_per_host // tensor))
    message = message_bytes(shape, config, rank_tokens)
    reduced = all_reduce_seconds(message, hardware, tensor, hardware.gpus_per_host)
    return count * (max(products, gathers) + traffic.reductions * reduced)


def training_flops(shape: ModelShape, config: RunConfig, context: float) -> float:
    """Returns the FLOPs per token of a forward and a backward pass, if a token sees `context` others on average."""
    training = config.training
    layer, output = _layer_flops(shape, context), 2 * shape.output_parameters
    # Without gradients of weights the backward pass has half the products.
    backward = 2 if training.lora.rank is None else 1
    trained_layer = layer * backward
    if training.activation_checkpointing is True:
        # The sum over experts needs the results of their last products.
        trained_layer += layer - (0 if shape.experts else 2 * shape.hidden * shape.intermediate)
    trained_layers = shape.layers - training.frozen_layers
    return shape.layers * layer + trained_layers * trained_layer + output * (2 + backward)


def _layer_flops(shape: ModelShape, context: float) -> float:
    """FLOPs of a layer per token, forward."""
    return 2 * shape.active_layer_parameters + 4 * shape.heads * shape.head_dim * context


def sync_seconds(
    shape: ModelShape, config: RunConfig, hardware: Hardware, *, generator_gpus: int, dtype: str
) -> tuple[float, float, float]:
    """Returns the hand-over, push and pause of a version in `dtype`, or of an adapter, as in `Costs`."""
    gpus = trainer_gpus(config)
    if config.sends_adapters:
        numbers, width = trained_parameters(shape, config), TRAINED_BYTES
    else:
        numbers, width = shape.parameters, BYTES[dtype]
    nbytes = float(numbers * width)
    host_copy = hardware.host_copy * HOST_COPY_SHARE
    pause, verify = nbytes / generator_gpus / host_copy, nbytes / _HASH_RATE + _POLL_SECONDS
    transport = config.effective_weights.transport
    shard = nbytes / gpus
    if transport in LIVE:
        memory_rate = hardware.memory_rate * MEMORY_SHARE
        sums = shard / memory_rate + _POLL_SECONDS
        if transport == "ipc":
            return shard / hardware.host_copy, sums, nbytes / hardware.host_copy
        pools = config.placement.train.work_pool, config.placement.generate.work_pool
        link = LINK_SHARE * (hardware.nvlink if pools == (None, None) else hardware.network)
        # float32 is read and the generators' dtype written. Rank 0 receives the other ranks' shards and sends them all.
        copied = shard * (1 + TRAINED_BYTES / BYTES[dtype])
        return copied / memory_rate, sums, (2 * nbytes - shard) / link
    if transport == "direct":
        return shard / host_copy, shard / _HASH_RATE + nbytes / _SOCKET_RATE + verify, pause
    gathered = all_gather_seconds(float(numbers * TRAINED_BYTES), hardware, gpus, hardware.gpus_per_host)
    stored = nbytes / _WRITE_RATE + nbytes / _READ_RATE if transport == "store" else 0.0
    return gathered + nbytes / host_copy, stored + verify, pause


def checkpoint_seconds(shape: ModelShape, config: RunConfig, hardware: Hardware) -> float:
    """How long the trainer stands still for a checkpoint: each rank copies weights and two moments of its shards."""
    nbytes = trained_parameters(shape, config) * 3 * TRAINED_BYTES
    return nbytes / trainer_gpus(config) / (hardware.host_copy * HOST_COPY_SHARE)
