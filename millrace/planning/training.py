"""How long an optimizer step takes: products, collectives, and the optimizer's own traffic.

    batch ─► updates ─► microbatches: on each rank  max( products,  FSDP's gathers and scatters )  + all-reduces of
                                                                                                     tensor ranks
         ─► forward passes alone: log π before the first of several updates, log π of the reference
         ─► AdamW

Products: forward 2 FLOPs per parameter and token, backward twice that; attention in addition. So 6 N per token. With
activation checkpointing a layer is computed forward once more, up to the input of a dense layer's last product: 7.5 N
instead of 8 N. The output layer takes 8 per parameter, because its logits are computed once more
(`millrace.training.logprobs`). `MFU` of the peak is reached. FSDP2 gathers a layer while the one before computes, so
the slower of the two counts. Tensor ranks wait for each all-reduce. Weights that are trained are in float32, and so are
their gradients and moments.
"""

import math
from dataclasses import dataclass

from configs.schema import RunConfig
from millrace.planning.hardware import (
    HOST_COPY_SHARE,
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


def trainer_gpus(config: RunConfig) -> int:
    """Returns the number of the trainer's GPUs: FSDP ranks × tensor ranks."""
    return config.training.parallel.data * config.training.parallel.tensor


def compute_dtype(config: RunConfig) -> str:
    """Returns the number format of forward and backward passes."""
    return config.training.compute_dtype or config.model.dtype


def trained_parameters(shape: ModelShape, config: RunConfig) -> int:
    """Counts the parameters with a gradient."""
    training = config.training
    trained_layers = shape.layers - training.frozen_layers
    if training.lora.rank is not None:
        matrices = shape.layer_matrices().items()
        adapted = sum(rows + columns for name, (rows, columns) in matrices if name in training.lora.target_modules)
        return trained_layers * training.lora.rank * adapted
    if not training.frozen_layers:
        return shape.parameters
    # The embeddings are frozen with the first layers, and so is the output layer if it is the same tensor.
    return trained_layers * shape.layer_parameters + (0 if shape.tied else shape.output_parameters)


def step_seconds(shape: ModelShape, config: RunConfig, hardware: Hardware, *, tokens: float, rollouts: int) -> float:
    """Returns the seconds of an optimizer step on `tokens` tokens, prompts included, of about equally long rollouts."""
    if tokens <= 0:
        return 0.0
    training, gpus = config.training, trainer_gpus(config)
    passes = _Passes(shape, config, hardware, context=tokens / rollouts / 2)
    updates = training.minibatches * training.epochs
    optimizer = trained_parameters(shape, config) / gpus * TRAINED_BYTES * _ADAMW_PASSES
    update = passes.train(tokens / training.minibatches) + optimizer / (hardware.memory_rate * MEMORY_SHARE)
    seconds = updates * update
    if updates > 1:
        seconds += passes.forward(tokens)
    if training.kl.coefficient > 0:
        # The reference policy's shards come from the CPU's memory, and go back there.
        moved = 2 * shape.parameters / gpus * BYTES[config.model.dtype]
        seconds += passes.forward(tokens) + moved / (hardware.host_copy * HOST_COPY_SHARE)
    return seconds


def training_flops(shape: ModelShape, config: RunConfig, context: float) -> float:
    """Returns the FLOPs per token of a forward and a backward pass, if a token sees `context` others on average."""
    training = config.training
    layer, output = _layer_flops(shape, context), 2 * shape.output_parameters
    # Without gradients of weights the backward pass has half the products.
    backward = 2 if training.lora.rank is None else 1
    trained_layer = layer * backward
    if training.activation_checkpointing:
        # The sum over experts needs the results of their last products.
        trained_layer += layer - (0 if shape.experts else 2 * shape.hidden * shape.intermediate)
    trained_layers = shape.layers - training.frozen_layers
    return shape.layers * layer + trained_layers * trained_layer + output * (2 + backward)


def _layer_flops(shape: ModelShape, context: float) -> float:
    """FLOPs of a layer per token, forward."""
    return 2 * shape.active_layer_parameters + 4 * shape.heads * shape.head_dim * context


@dataclass(frozen=True)
class _Passes:
    """Seconds of passes over tokens, in microbatches, on all ranks in parallel."""

    shape: ModelShape
    config: RunConfig
    hardware: Hardware
    context: float

    def train(self, tokens: float) -> float:
        """Forward and backward."""
        shape, training, weights = self.shape, self.config.training, self._gathered_weights
        trained_share = trained_parameters(shape, self.config) / shape.parameters
        # Gradients are summed in float32.
        gathered = weights * (2 * BYTES[compute_dtype(self.config)] + TRAINED_BYTES * trained_share)
        trained_layers = shape.layers - training.frozen_layers
        reduced_layers = shape.layers + trained_layers * (1 + int(training.activation_checkpointing))
        return self._seconds(tokens, training_flops(shape, self.config, self.context), gathered, 2 * reduced_layers)

    def forward(self, tokens: float) -> float:
        """Forward alone."""
        shape = self.shape
        flops = shape.layers * _layer_flops(shape, self.context) + 2 * shape.output_parameters
        gathered = self._gathered_weights * BYTES[compute_dtype(self.config)]
        return self._seconds(tokens, flops, gathered, 2 * shape.layers)

    @property
    def _gathered_weights(self) -> float:
        """Numbers that a rank gathers of the whole model: tensor ranks gather their part of each layer."""
        layers = self.shape.layers * self.shape.layer_parameters
        return layers / self.config.training.parallel.tensor + self.shape.other_parameters

    def _seconds(self, tokens: float, flops: float, gathered: float, reductions: int) -> float:
        """`flops` per token; `gathered` bytes and `reductions` all-reduces of tensor ranks per microbatch."""
        training, hardware = self.config.training, self.hardware
        data, tensor, dtype = training.parallel.data, training.parallel.tensor, compute_dtype(self.config)
        # Every rank has as many microbatches, and at least one.
        count = max(1, math.ceil(tokens / (data * training.max_tokens_per_microbatch)))
        rank_tokens = tokens / data / count
        mfu = MFU * (_MIXTURE_FACTOR if self.shape.experts else 1.0)
        products = rank_tokens * flops / tensor / (hardware.flops[dtype] * mfu)
        per_host = max(1, hardware.gpus_per_host // tensor)
        gathers = all_gather_seconds(gathered, hardware, data, per_host)
        message = rank_tokens * self.shape.hidden * BYTES[dtype]
        reduced = all_reduce_seconds(message, hardware, tensor, hardware.gpus_per_host)
        return count * (max(products, gathers) + reductions * reduced)
