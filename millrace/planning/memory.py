"""Memory of the trainer's and the generators' GPUs, bytes.

    trainer      weights, gradients, two moments: sharded over its ranks, in the weights' format
               + a layer and the one after it, gathered, with its gradient; embeddings and output layer
               + activations of a microbatch;  or, before them, the reference policy's shards
               + logits of a chunk, and the output layer's gradient
    generator    weights of its share + key-value cache of its slots

Activations are those of transformers' Llama in 16 bits: per token and layer 8 numbers of the hidden size (norms compute
in float32), 3 of the queries', a key, a value, and 4 of the feed-forward block's, which tensor ranks divide. With
checkpointing, a layer keeps its input alone, or with the selective one also the results of products and attention, and
only one has more. A compiled layer needs less. Offloaded moments need none of it.
"""

from dataclasses import dataclass

from configs.schema import RunConfig
from millrace.planning.hardware import GIB, Hardware
from millrace.planning.models import BYTES, ModelShape
from millrace.planning.training import TRAINED_BYTES, trained_parameters, trainer_gpus
from millrace.training.logprobs import CHUNK_ELEMENTS

_RESERVED_BYTES = 4 * GIB
"""Memory of a GPU for the CUDA context, NCCL, kernels' workspaces and fragmentation."""
_GENERATOR_SHARE = 0.92
"""Share of its GPU that vLLM 0.32 uses unless `gpu_memory_utilization` says otherwise."""
_LOGITS_AT_ONCE = 3
"""Float32 matrices of a chunk that exist together: logits, probabilities, gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport:
    """Memory that a GPU of the trainer and one of a generator need, and its capacity, bytes."""

    trainer: float
    generator: float
    hardware_name: str
    capacity: float

    @property
    def trainer_fits(self) -> bool:
        return self.trainer <= self.capacity

    @property
    def fits(self) -> bool:
        return max(self.trainer, self.generator) <= self.capacity

    @property
    def sentence(self) -> str | None:
        """Names the stages that do not fit, and by how much; None if all fits."""
        short = [
            f"{what} needs {needed / GIB:.0f} GiB per GPU, {self.hardware_name} has {self.capacity / GIB:.0f}: "
            f"{max(1, round((needed - self.capacity) / GIB))} GiB too much"
            for what, needed in (("the trainer", self.trainer), ("a generator", self.generator))
            if needed > self.capacity
        ]
        return "; ".join(short) or None


def trainer_memory(shape: ModelShape, config: RunConfig) -> float:
    """Returns the bytes per GPU at the worst moment, for microbatches of `max_tokens_per_microbatch`."""
    training, tensor = config.training, config.training.parallel.tensor
    frozen, compute = BYTES[config.model.dtype], BYTES[config.compute_dtype]
    # Tensor ranks divide layers, and each has the rest.
    sharded = (shape.layers * shape.layer_parameters / tensor + shape.other_parameters) / training.parallel.data
    trained = sharded * trained_parameters(shape, config) / shape.parameters
    states = (sharded - trained) * frozen + (2 if training.optimizer_offload else 4) * trained * TRAINED_BYTES
    layer = shape.layer_parameters / tensor
    gathered = 0.0
    # Alone and in one format, weights are used where they are.
    if trainer_gpus(config) > 1 or compute != TRAINED_BYTES:
        # Gradients are summed in float32, in addition to those of the pass.
        gathered = 2 * layer * compute + layer * (compute + 4) + shape.other_parameters * compute
    microbatch = training.max_tokens_per_microbatch
    one_layer, trained_layers = layer_activations(shape, tensor), shape.layers - training.frozen_layers
    activations = max(1, trained_layers) * one_layer
    if training.activation_checkpointing:
        kept = shape.hidden if training.activation_checkpointing is True else _products(shape, tensor)
        activations = trained_layers * kept + one_layer
    elements = min(CHUNK_ELEMENTS["cuda"], microbatch * shape.vocabulary)
    # The gradient of the output layer's weight is summed over chunks in float32.
    logits = 4.0 * (elements * _LOGITS_AT_ONCE + shape.output_parameters)
    reference = sharded * frozen + microbatch * compute * one_layer if training.kl.coefficient > 0 else 0.0
    return states + gathered + max(microbatch * compute * activations + logits, reference) + _RESERVED_BYTES


def layer_activations(shape: ModelShape, tensor: int) -> float:
    """Counts the numbers that a layer keeps per token for the backward pass."""
    attention = (3 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    feed_forward = 4 * shape.intermediate * (shape.experts_per_token or 1)
    return 8 * shape.hidden + (attention + feed_forward) / tensor


def _products(shape: ModelShape, tensor: int) -> float:
    """Counts the numbers of a layer's input, of its products and its attention per token; two more if compiled."""
    attention = (2 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    feed_forward = 2 * shape.intermediate * (shape.experts_per_token or 1)
    return 5 * shape.hidden + (attention + feed_forward) / tensor


def generator_memory(
    shape: ModelShape,
    hardware: Hardware,
    *,
    tensor: int,
    dtype: str,
    kv_dtype: str,
    cached_tokens: float,
    memory_share: float | None,
) -> float:
    """Returns the bytes per GPU of an engine of `tensor` GPUs that holds `cached_tokens` in its key-value cache.

    `memory_share`: vLLM's `gpu_memory_utilization`; the rest counts as reserved.
    """
    share = _GENERATOR_SHARE if memory_share is None else memory_share
    weights = shape.parameters * BYTES[dtype] / tensor
    # A key-value head is on several GPUs if there are fewer heads.
    cached = cached_tokens * shape.kv_bytes(kv_dtype) / min(tensor, shape.kv_heads)
    return weights + cached + _RESERVED_BYTES + (1 - share) * hardware.memory_bytes
