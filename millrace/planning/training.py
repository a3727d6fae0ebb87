"""How long an optimizer step takes: products, collectives, and the optimizer's own traffic.

    batch ─► updates ─► microbatches: on each rank  max( products,  FSDP's gathers and scatters )  + all-reduces of
                                                                                                     tensor ranks
         ─► forward passes alone: log π before the first of several updates, log π of the reference
         ─► AdamW

Products: forward 2 FLOPs per parameter and token, backward twice that; attention in addition. So 6 N per token. With
activation checkpointing a layer is computed forward once more, up to the input of a dense layer's last product: 7.5 N
instead of 8 N. The output layer takes 8 per parameter, because its logits are computed once more
(`millrace.training.logprobs`). `Assumptions.mfu` of the peak is reached. FSDP2 gathers a layer while the one before
computes, so the slower of the two counts. Tensor ranks wait for each all-reduce.
"""

import math
from dataclasses import dataclass

from millrace.planning.hardware import Assumptions, Hardware, all_gather_seconds, all_reduce_seconds
from millrace.planning.models import BYTES, ModelShape

_ADAMW_PASSES = 24
"""How often each trained number is read or written, or one of its kind: gradient, two moments, temporaries. torch's
AdamW does one operation after the other on all parameters; clipping the gradient is among them."""
_SUMMED_IN = 4
"""Bytes of a gradient while ranks sum it: float32."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerSetup:
    """How a policy is trained, without the sizes of its batches."""

    data: int
    """FSDP2 ranks."""
    tensor: int = 1
    """GPUs that divide each layer; consecutive ones, so as many as possible are in one host."""
    dtype: str = "float32"
    """Number format of trained weights, gradients and moments."""
    frozen_dtype: str = "float32"
    """Number format of frozen weights, and of the reference policy's."""
    compute_dtype: str = "bfloat16"
    """Number format of forward and backward passes."""
    activation_checkpointing: bool = False
    max_tokens_per_microbatch: int = 16_384
    minibatches: int = 1
    epochs: int = 1
    frozen_layers: int = 0
    lora_rank: int | None = None
    lora_modules: tuple[str, ...] = ()
    """Names of the linear layers with an adapter."""
    reference: bool = False
    """Whether a reference policy computes log π of each batch."""

    @property
    def gpus(self) -> int:
        """GPUs of the trainer."""
        return self.data * self.tensor


def step_seconds(
    shape: ModelShape,
    setup: TrainerSetup,
    hardware: Hardware,
    assumptions: Assumptions,
    *,
    tokens: float,
    rollouts: int,
) -> float:
    """Returns the seconds of an optimizer step on `tokens` tokens, prompts included, of about equally long rollouts."""
    if tokens <= 0:
        return 0.0
    passes = _Passes(shape, setup, hardware, assumptions, context=tokens / rollouts / 2)
    updates = setup.minibatches * setup.epochs
    optimizer = trained_parameters(shape, setup) / setup.gpus * BYTES[setup.dtype] * _ADAMW_PASSES
    update = passes.training(tokens / setup.minibatches) + optimizer / (hardware.memory_rate * assumptions.memory_share)
    seconds = updates * update
    if updates > 1:
        seconds += passes.forward(tokens)
    if setup.reference:
        # Its shards come from the CPU's memory, and go back there.
        moved = 2 * shape.parameters / setup.gpus * BYTES[setup.frozen_dtype]
        seconds += passes.forward(tokens) + moved / (hardware.host_copy * assumptions.host_copy_share)
    return seconds


def trained_parameters(shape: ModelShape, setup: TrainerSetup) -> int:
    """Counts the parameters with a gradient."""
    trained_layers = shape.layers - setup.frozen_layers
    if setup.lora_rank is not None:
        matrices = shape.layer_matrices().items()
        adapted = sum(rows + columns for name, (rows, columns) in matrices if name in setup.lora_modules)
        return trained_layers * setup.lora_rank * adapted
    if not setup.frozen_layers:
        return shape.parameters
    # The embeddings are frozen with the first layers, and so is the output layer if it is the same tensor.
    return trained_layers * shape.layer_parameters + (0 if shape.tied else shape.output_parameters)


def training_flops(shape: ModelShape, setup: TrainerSetup, context: float) -> float:
    """FLOPs per token of a forward and a backward pass, if a token sees `context` others on average."""
    layer, output = _layer_flops(shape, context), 2 * shape.output_parameters
    # Without gradients of weights the backward pass has half the products.
    backward = 2 if setup.lora_rank is None else 1
    trained_layer = layer * backward
    if setup.activation_checkpointing:
        # The sum over experts needs the results of their last products.
        trained_layer += layer - (0 if shape.experts else 2 * shape.hidden * shape.intermediate)
    trained_layers = shape.layers - setup.frozen_layers
    return shape.layers * layer + trained_layers * trained_layer + output * (2 + backward)


def _layer_flops(shape: ModelShape, context: float) -> float:
    """FLOPs of a layer per token, forward."""
    return 2 * shape.active_layer_parameters + 4 * shape.heads * shape.head_dim * context


@dataclass(frozen=True)
class _Passes:
    """Seconds of passes over tokens, in microbatches, on all ranks in parallel."""

    shape: ModelShape
    setup: TrainerSetup
    hardware: Hardware
    assumptions: Assumptions
    context: float

    def training(self, tokens: float) -> float:
        """Forward and backward."""
        setup, shape = self.setup, self.shape
        trained_share = trained_parameters(shape, setup) / shape.parameters
        gathered = 2 * self._weights + self._weights / BYTES[setup.compute_dtype] * _SUMMED_IN * trained_share
        trained_layers = shape.layers - setup.frozen_layers
        reduced_layers = shape.layers + trained_layers * (1 + int(setup.activation_checkpointing))
        return self._seconds(tokens, training_flops(shape, setup, self.context), gathered, 2 * reduced_layers)

    def forward(self, tokens: float) -> float:
        """Forward alone."""
        shape = self.shape
        flops = shape.layers * _layer_flops(shape, self.context) + 2 * shape.output_parameters
        return self._seconds(tokens, flops, self._weights, 2 * shape.layers)

    def _seconds(self, tokens: float, flops: float, gathered: float, reductions: int) -> float:
        """`flops` per token; `gathered` bytes and `reductions` all-reduces of tensor ranks per microbatch."""
        setup, hardware = self.setup, self.hardware
        # Every rank has as many microbatches, and at least one.
        count = max(1, math.ceil(tokens / (setup.data * setup.max_tokens_per_microbatch)))
        own = tokens / setup.data / count
        mfu = self.assumptions.mfu * (self.assumptions.mixture_mfu_factor if self.shape.experts else 1.0)
        products = own * flops / setup.tensor / (hardware.flops_in(setup.compute_dtype) * mfu)
        per_host = max(1, hardware.gpus_per_host // setup.tensor)
        gathers = all_gather_seconds(gathered, hardware, setup.data, per_host, self.assumptions)
        message = own * self.shape.hidden * BYTES[setup.compute_dtype]
        reduced = all_reduce_seconds(message, hardware, setup.tensor, hardware.gpus_per_host, self.assumptions)
        return count * (max(products, gathers) + reductions * reduced)

    @property
    def _weights(self) -> float:
        """Bytes that a rank gathers of the whole model: tensor ranks gather their part of each layer."""
        shape, setup = self.shape, self.setup
        numbers = shape.layers * shape.layer_parameters / setup.tensor + shape.other_parameters
        return numbers * BYTES[setup.compute_dtype]
