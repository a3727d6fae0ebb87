"""What trainer and generators need of a GPU's memory, and whether it has that.

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

from millrace.planning.costs.assumptions import Assumptions
from millrace.planning.costs.hardware import Hardware
from millrace.planning.costs.model_shape import BYTES, ModelShape
from millrace.planning.costs.training import TrainerSetup, trained_parameters
from millrace.training.logprobs import CHUNK_ELEMENTS

_GIB = 2**30
_LOGITS_AT_ONCE = 3
"""Float32 matrices of a chunk that exist together: logits, probabilities, gradient."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Bytes of each GPU of the trainer."""

    states: float
    """Weights, gradients and moments, sharded."""
    gathered: float
    """Layers in use, whole."""
    activations: float
    logits: float
    reference: float
    """The reference policy while it computes, when there are no activations."""
    reserved: float

    @property
    def total(self) -> float:
        """At the worst moment."""
        return self.states + self.gathered + max(self.activations + self.logits, self.reference) + self.reserved


@dataclass(frozen=True, kw_only=True, slots=True)
class GeneratorMemory:
    """Bytes of each GPU of a generator."""

    weights: float
    cache: float
    """Key-value cache of all places, at the lengths that requests have on average while they run."""
    longest: float
    """Key-value cache of one request of the greatest length."""
    reserved: float

    @property
    def total(self) -> float:
        """With all places taken."""
        return self.weights + max(self.cache, self.longest) + self.reserved


def trainer_memory(shape: ModelShape, setup: TrainerSetup, assumptions: Assumptions) -> TrainerMemory:
    """Bytes per GPU for microbatches of `max_tokens_per_microbatch`."""
    weight, frozen, compute = BYTES[setup.dtype], BYTES[setup.frozen_dtype], BYTES[setup.compute_dtype]
    own = _own_parameters(shape, setup)
    trained = own * trained_parameters(shape, setup) / shape.parameters
    layer = shape.layer_parameters / setup.tensor
    # Alone and in one format, weights are used where they are.
    sharded = setup.gpus > 1 or setup.compute_dtype != setup.dtype
    # Gradients are summed in float32, beside those of the pass.
    in_use = 2 * layer * compute + layer * (compute + 4) + shape.other_parameters * compute
    return TrainerMemory(
        states=(own - trained) * frozen + trained * 4 * weight,
        gathered=in_use if sharded else 0.0,
        activations=_activations(shape, setup),
        logits=_logits(shape, setup),
        reference=own * frozen + _forward_activations(shape, setup) if setup.reference else 0.0,
        reserved=assumptions.reserved_bytes,
    )


def generator_memory(
    shape: ModelShape,
    *,
    tensor: int,
    dtype: str,
    kv_dtype: str,
    cached_tokens: float,
    longest_tokens: int,
    hardware: Hardware,
    assumptions: Assumptions,
    memory_share: float | None = None,
) -> GeneratorMemory:
    """Bytes per GPU of an engine of `tensor` GPUs that holds `cached_tokens` in its key-value cache.

    `longest_tokens`: of a prompt with the longest response. `memory_share`: vLLM's `gpu_memory_utilization`; what it
    leaves counts as reserved.
    """
    share = assumptions.generator_memory_share if memory_share is None else memory_share
    per_token = shape.kv_bytes(kv_dtype) / min(tensor, shape.kv_heads)
    return GeneratorMemory(
        weights=shape.parameters * BYTES[dtype] / tensor,
        cache=cached_tokens * per_token,
        longest=longest_tokens * per_token,
        reserved=assumptions.reserved_bytes + (1 - share) * hardware.memory_bytes,
    )


def cache_places(memory: GeneratorMemory, hardware: Hardware, places: int) -> int:
    """Of a generator's places, those that its key-value cache has room for at the average length."""
    room = hardware.memory_bytes - memory.weights - memory.reserved
    return max(0, min(places, int(room / memory.cache * places))) if memory.cache else places


def shortfall(what: str, needed: float, hardware: Hardware) -> str | None:
    """A sentence that says by how much a GPU is too small; None if it is not."""
    if needed <= hardware.memory_bytes:
        return None
    has = hardware.memory_bytes / _GIB
    return (
        f"{what} needs {needed / _GIB:.0f} GiB per GPU, {hardware.name} has {has:.0f}: "
        f"{max(1, round(needed / _GIB - has))} GiB too much"
    )


def _own_parameters(shape: ModelShape, setup: TrainerSetup) -> float:
    """Of one rank: tensor ranks divide layers, and each has the rest."""
    return (shape.layers * shape.layer_parameters / setup.tensor + shape.other_parameters) / setup.data


def _layer_activations(shape: ModelShape, tensor: int) -> float:
    """Numbers that a layer keeps per token."""
    attention = (3 * shape.heads + 2 * shape.kv_heads) * shape.head_dim
    feed_forward = 4 * shape.intermediate * (shape.experts_per_token or 1)
    return 8 * shape.hidden + (attention + feed_forward) / tensor


def _activations(shape: ModelShape, setup: TrainerSetup) -> float:
    tokens, nbytes = setup.max_tokens_per_microbatch, BYTES[setup.compute_dtype]
    layer, trained = _layer_activations(shape, setup.tensor), shape.layers - setup.frozen_layers
    kept = trained * shape.hidden + layer if setup.activation_checkpointing else max(1, trained) * layer
    return tokens * nbytes * kept


def _forward_activations(shape: ModelShape, setup: TrainerSetup) -> float:
    return setup.max_tokens_per_microbatch * BYTES[setup.compute_dtype] * _layer_activations(shape, setup.tensor)


def _logits(shape: ModelShape, setup: TrainerSetup) -> float:
    elements = min(CHUNK_ELEMENTS["cuda"], setup.max_tokens_per_microbatch * shape.vocabulary)
    # The gradient of the output layer's weight is summed over chunks in float32.
    return 4.0 * (elements * _LOGITS_AT_ONCE + shape.output_parameters)
