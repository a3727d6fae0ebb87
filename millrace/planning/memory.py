"""Memory of the trainer's and the generators' GPUs, bytes.

    trainer      weights, gradients, two moments: sharded over its ranks, in the weights' format
               + embeddings and output layer, gathered
               + activations of a microbatch
               + at the output layer: logits of a chunk, the weight's gradient, and the last layer, gathered
                 or at a layer: two of them gathered, two gradients of one, and temporaries of its backward pass
                 or before all this: the reference policy's shards
    generator    weights of its share + key-value cache of its slots

Activations are those of transformers' models in 16 bits: per token and layer 8 numbers of the hidden size (norms
compute in float32), 3 of the queries', a key, a value, and 4 of the feed-forward block's, which tensor ranks divide.
Norms of heads keep 3 numbers more for each of a query and a key, and 1 less of the query; each of several experts has
a copy of the hidden state before and after it. With checkpointing, a layer keeps its input alone, or with the selective
one also the results of products and attention, and only one has more. A compiled layer needs less. Offloaded moments
need none of it. `python -m benchmarks.fake_cluster` compares all this with the trainer's own code.
"""

from dataclasses import dataclass, fields, replace

from configs.schema import RunConfig
from millrace.planning.hardware import GIB, Hardware
from millrace.planning.models import BYTES, ModelShape
from millrace.planning.training import TRAINED_BYTES, compute_dtype, trained_parameters, trainer_gpus
from millrace.training.logprobs import CHUNK_ELEMENTS

_RESERVED_BYTES = 4 * GIB
"""Memory of a GPU for the CUDA context, NCCL, kernels' workspaces and fragmentation."""
_GENERATOR_SHARE = 0.92
"""Share of its GPU that vLLM 0.32 uses unless `gpu_memory_utilization` says otherwise."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainerMemory:
    """Memory of a trainer's GPU, bytes, at the moment of a step that takes the most."""

    parameters: float
    gradients: float
    moments: float
    gathered: float
    """Whole weights and gradients of layers, and of the embeddings and the output layer."""
    activations: float
    """Kept for the backward pass."""
    temporaries: float
    reserved: float = _RESERVED_BYTES

    @property
    def total(self) -> float:
        return float(sum(getattr(self, part.name) for part in fields(self)))


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


def trainer_memory(shape: ModelShape, config: RunConfig) -> TrainerMemory:
    """Returns the memory of a GPU for microbatches of `max_tokens_per_microbatch`."""
    training, tensor = config.training, config.training.parallel.tensor
    frozen, compute = BYTES[config.model.dtype], BYTES[compute_dtype(config)]
    tokens = training.max_tokens_per_microbatch * compute
    """Bytes of one number per token."""
    # Tensor ranks divide layers, and each has the rest.
    sharded = (shape.layers * shape.layer_parameters / tensor + shape.other_parameters) / training.parallel.data
    trained = sharded * trained_parameters(shape, config) / shape.parameters
    states = {
        "parameters": (sharded - trained) * frozen + trained * TRAINED_BYTES,
        "gradients": trained * TRAINED_BYTES,
        "moments": 0.0 if training.optimizer_offload else 2 * trained * TRAINED_BYTES,
    }
    # Alone and in one format, weights are used where they are.
    gathers = trainer_gpus(config) > 1 or compute != TRAINED_BYTES
    layer, embeddings = (shape.layer_parameters / tensor, shape.other_parameters) if gathers else (0, 0)
    kept, trained_layers = layer_activations(shape, tensor), shape.layers - training.frozen_layers
    kept_by = {False: kept, True: shape.hidden, "selective": _products(shape, tensor)}
    activations = tokens * trained_layers * kept_by[training.activation_checkpointing]
    at_output = TrainerMemory(
        **states,
        # The last layer is gathered for its backward pass already.
        gathered=(embeddings + layer) * compute,
        activations=activations,
        temporaries=_logits(shape, config),
    )
    at_layer = TrainerMemory(
        **states,
        # The layer, the next one, and the gradient of the one before, which is summed in float32.
        gathered=(embeddings + 2 * layer) * compute + layer * TRAINED_BYTES,
        activations=activations,
        temporaries=(layer + shape.output_parameters) * compute
        + tokens * (_feed_forward(shape, tensor) + (kept if training.activation_checkpointing else 0)),
    )
    peaks = [at_output, at_layer]
    if training.kl.coefficient > 0:
        reference = sharded * frozen + tokens * kept
        peaks.append(replace(at_layer, activations=0.0, temporaries=reference))
    return max(peaks, key=lambda peak: peak.total)


def _logits(shape: ModelShape, config: RunConfig) -> float:
    """Logits of a chunk, their gradient in the format of the pass, and the sum of the output layer's gradient."""
    elements = min(CHUNK_ELEMENTS["cuda"], config.training.max_tokens_per_microbatch * shape.vocabulary)
    compute = BYTES[compute_dtype(config)]
    return elements * (2 * 4 + (compute if compute < 4 else 0)) + 4 * shape.output_parameters


def layer_activations(shape: ModelShape, tensor: int) -> float:
    """Counts the numbers that a layer keeps per token for the backward pass."""
    attention = (5 * shape.heads + 5 * shape.kv_heads) if shape.head_norms else (3 * shape.heads + 2 * shape.kv_heads)
    feed_forward = 4 * shape.intermediate
    if shape.experts:
        # Each chosen expert has its own copy of the hidden state, before and after.
        feed_forward = shape.experts_per_token * (feed_forward + 2 * shape.hidden)
    return 8 * shape.hidden + (attention * shape.head_dim + feed_forward) / tensor


def _feed_forward(shape: ModelShape, tensor: int) -> float:
    """Counts the numbers per token that the backward pass of a feed-forward block makes, all alive at once."""
    return shape.hidden + 3 * shape.intermediate * (shape.experts_per_token or 1) / tensor


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
