"""What trainer and generators need of a GPU's memory, bytes.

    trainer      weights, gradients, two moments: sharded over its ranks, in the weights' format
               + a layer and the one after it, gathered, with its gradient; embeddings and output layer
               + activations of a microbatch;  or, before them, the reference policy's shards
               + logits of a chunk, and the output layer's gradient
    generator    weights of its share + key-value cache of its places

Activations are those that transformers' Llama keeps for the backward pass in 16 bits: per token and layer 8 numbers of
the hidden size (norms compute in float32), 3 of the queries', a key, a value, and 4 of the feed-forward block's, which
tensor ranks divide. With checkpointing, a layer keeps its input alone, and only one has more.
"""

from dataclasses import dataclass

from millrace.planning.hardware import GIB, Assumptions, Hardware
from millrace.planning.models import BYTES, ModelShape
from millrace.planning.training import TrainerSetup, trained_parameters
from millrace.training.logprobs import CHUNK_ELEMENTS

_LOGITS_AT_ONCE = 3
"""Float32 matrices of a chunk that exist together: logits, probabilities, gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """What a GPU of the trainer and one of a generator need, bytes, and what it has."""

    trainer: float
    generator: float
    hardware_name: str
    capacity: float

    @property
    def trainer_fits(self) -> bool:
        """Whether the trainer does."""
        return self.trainer <= self.capacity

    @property
    def fits(self) -> bool:
        """Whether trainer and generators both do."""
        return max(self.trainer, self.generator) <= self.capacity

    @property
    def sentence(self) -> str | None:
        """What does not fit, and by how much; None if all fits."""
        short = [
            f"{what} needs {needed / GIB:.0f} GiB per GPU, {self.hardware_name} has {self.capacity / GIB:.0f}: "
            f"{max(1, round((needed - self.capacity) / GIB))} GiB too much"
            for what, needed in (("the trainer", self.trainer), ("a generator", self.generator))
            if needed > self.capacity
        ]
        return "; ".join(short) or None


def trainer_memory(shape: ModelShape, setup: TrainerSetup, assumptions: Assumptions) -> float:
    """Bytes per GPU at the worst moment, for microbatches of `max_tokens_per_microbatch`."""
    weight, frozen, compute = BYTES[setup.dtype], BYTES[setup.frozen_dtype], BYTES[setup.compute_dtype]
    # Tensor ranks divide layers, and each has the rest.
    own = (shape.layers * shape.layer_parameters / setup.tensor + shape.other_parameters) / setup.data
    trained = own * trained_parameters(shape, setup) / shape.parameters
    states = (own - trained) * frozen + 4 * trained * weight
    layer = shape.layer_parameters / setup.tensor
    # Alone and in one format, weights are used where they are.
    sharded = setup.gpus > 1 or setup.compute_dtype != setup.dtype
    # Gradients are summed in float32, in addition to those of the pass.
    gathered = 2 * layer * compute + layer * (compute + 4) + shape.other_parameters * compute if sharded else 0.0
    kept = setup.max_tokens_per_microbatch * compute
    one_layer, trained_layers = layer_activations(shape, setup.tensor), shape.layers - setup.frozen_layers
    if setup.activation_checkpointing:
        activations = kept * (trained_layers * shape.hidden + one_layer)
    else:
        activations = kept * max(1, trained_layers) * one_layer
    elements = min(CHUNK_ELEMENTS["cuda"], setup.max_tokens_per_microbatch * shape.vocabulary)
    # The gradient of the output layer's weight is summed over chunks in float32.
    logits = 4.0 * (elements * _LOGITS_AT_ONCE + shape.output_parameters)
    reference = own * frozen + kept * one_layer if setup.reference else 0.0
    return states + gathered + max(activations + logits, reference) + assumptions.reserved_bytes


def layer_activations(shape: ModelShape, tensor: int) -> float:
    """Counts the numbers that a layer keeps per token for the backward pass."""
    attention = (3 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    feed_forward = 4 * shape.intermediate * (shape.experts_per_token or 1)
    return 8 * shape.hidden + (attention + feed_forward) / tensor


def generator_memory(
    shape: ModelShape,
    hardware: Hardware,
    assumptions: Assumptions,
    *,
    tensor: int,
    dtype: str,
    kv_dtype: str,
    cached_tokens: float,
    memory_share: float | None,
) -> float:
    """Bytes per GPU of an engine of `tensor` GPUs that holds `cached_tokens` in its key-value cache.

    `memory_share`: vLLM's `gpu_memory_utilization`; what it leaves counts as reserved.
    """
    share = assumptions.generator_memory_share if memory_share is None else memory_share
    weights = shape.parameters * BYTES[dtype] / tensor
    cached = cached_tokens * shape.kv_bytes(kv_dtype) / min(tensor, shape.kv_heads)
    return weights + cached + assumptions.reserved_bytes + (1 - share) * hardware.memory_bytes
