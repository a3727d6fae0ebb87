"""A policy sharded over the ranks; its shards, and its whole tensors gathered again.

    policy of the model folder ─► each layer divided over a row (tensor.py) ─► each layer and the rest sharded over a
    column, or over each group of it (FSDP2, HSDP): a rank keeps its shard of every weight, gradient and optimizer state
    in the weights' own dtype

    forward, backward: a layer's shards are gathered in the compute dtype ─► used ─► freed; gradients are summed in
    float32, and each rank keeps its shard of the sum

The gradient is the sum over the ranks of a column, never a mean: each token's loss is already its share of the whole
batch (`millrace.training.objective`). FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from collections.abc import Iterator

import torch
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, Replicate, Shard
from transformers import PreTrainedModel

from millrace.models.modules import decoder_layers
from millrace.training.lora import adapters, base_name, is_adapter, parts
from millrace.training.parallel.ranks import TENSOR, Ranks, data_dims, local, mesh_of_one
from millrace.training.parallel.tensor import replicate, split_layer
from millrace.training.policy import PackedPolicy
from millrace.weights.adapter import merged, peft_names
from millrace.weights.direct.layout import ShardLayout, TensorSpec

_SAMPLE = 1 << 20
"""Weights of each rank that are compared around a step: a share of 0.1 % is then within a tenth, at no cost next to a
step."""


def shard(policy: PackedPolicy, ranks: Ranks, *, compute_dtype: torch.dtype | None = None) -> None:
    """Shards `policy` over the ranks, in place; it computes in `compute_dtype`, or in the weights' dtype if None.

    Every rank calls this before making an optimizer, with the same weights on the CPU, or with none, on the meta
    device: `StartModel` then fills the shards. A single rank, with all weights in the dtype to compute in, only moves
    the policy to its device. Raises InputError for a module that can't be divided.
    """
    parameters = list(policy.parameters())
    weights_dtype = next((parameter.dtype for parameter in parameters if parameter.requires_grad), torch.float32)
    if ranks.size == 1 and {parameter.dtype for parameter in parameters} <= {compute_dtype or weights_dtype}:
        policy.to(ranks.device)
        return
    mesh = ranks.mesh or mesh_of_one(ranks.device)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.promote_types(weights_dtype, torch.float32),
        # Inputs have the compute dtype already, or have to keep theirs, as the temperatures.
        cast_forward_inputs=False,
    )
    data_mesh = mesh[data_dims(mesh)]
    layers = decoder_layers(policy.model)
    for name, layer in layers.items():
        # Layer by layer, so that a device never holds more than one whole layer.
        if ranks.tensor_size > 1:
            split_layer(layer, name, mesh[TENSOR])
        _sum_gradients(fully_shard(layer, mesh=data_mesh, mp_policy=precision))
    if ranks.tensor_size > 1:
        inside = {module for layer in layers.values() for module in layer.modules()}
        rest = (module for module in policy.modules() if module not in inside)
        replicate([module for module in rest if any(True for _ in module.parameters(recurse=False))], mesh[TENSOR])
    # By default parameters outside of layers stay gathered after forward, for a backward pass that may not come: after
    # `over_vocabulary` they would be copies in the compute dtype.
    _sum_gradients(fully_shard(policy, mesh=data_mesh, mp_policy=precision, reshard_after_forward=True))
    register_fsdp_forward_method(policy, "over_vocabulary")


@torch.no_grad()
def base_tensors(model: PreTrainedModel, *, whole: bool) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each parameter of the base model, or of this rank's part as in `layout`; tied ones once.

    Adapters are merged in: W + (alpha / rank) · B · A. Every rank has to iterate to the end, because tensors are
    gathered from all ranks when they are yielded; only one exists at a time unless the caller keeps more. What is
    neither gathered nor has an adapter is yielded live and changes with the next step.
    """
    adapted = adapters(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        tensor = _gathered(parameter) if whole else local(parameter.detach())
        if (layer := adapted.get(name)) is not None:
            down, up, scaling = parts(layer)
            if whole:
                tensor = merged(tensor, _gathered(down), _gathered(up), scaling)
            else:
                tensor = merged(tensor, _own_columns(down.detach()), local(up.detach()), scaling)
        yield base_name(name), tensor


@torch.no_grad()
def adapter_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name in PEFT's files, tensor) of each A and B, whole. Every rank has to iterate to the end, as above."""
    for name, layer in adapters(model).items():
        down, up, _ = parts(layer)
        for peft_name, parameter in zip(peft_names(base_name(name)), (down, up), strict=True):
            yield peft_name, _gathered(parameter)


@torch.no_grad()
def sample_weights(model: PreTrainedModel, dtype: torch.dtype) -> torch.Tensor:
    """[n] copies of evenly spaced weights of this rank that training changes, adapters merged in; all ranks call this.

    In `dtype`, that of generators: an update smaller than its precision reaches no generator. At a learning rate of
    1e-6, a step changes about one bfloat16 in a hundred.
    """
    changing = {base_name(name) for name, parameter in model.named_parameters() if parameter.requires_grad}
    changing = {name for name in changing if not is_adapter(name)} | {base_name(name) for name in adapters(model)}
    sizes = [parameter.numel() for name, parameter in model.named_parameters() if base_name(name) in changing]
    spacing = max(1, sum(sizes) // _SAMPLE)
    own_tensors = ((name, part) for name, part in base_tensors(model, whole=False) if name in changing)
    # Off the GPU, whose memory the step needs.
    return torch.cat([part.reshape(-1)[::spacing].to(dtype) for _, part in own_tensors]).cpu()


def changed_share(sample: torch.Tensor, later_sample: torch.Tensor, ranks: Ranks) -> float:
    """The share of the sampled weights that differs, over the data ranks, which all have to call this."""
    changed = (sample != later_sample).sum().item()
    counts = torch.tensor([changed, len(sample)], dtype=torch.float64, device=ranks.device)
    total_changed, total = ranks.sum(counts).tolist()
    return float(total_changed / total)


def layout(model: PreTrainedModel, ranks: Ranks, dtype: torch.dtype) -> ShardLayout:
    """The part of each base-model parameter that every rank has; `dtype` is that of published weights."""
    tensors = tuple(
        TensorSpec(base_name(name), str(dtype).removeprefix("torch."), tuple(parameter.shape), _tensor_dim(parameter))
        for name, parameter in model.named_parameters()
        if not is_adapter(name)
    )
    replicas = ranks.replicas
    return ShardLayout(tensors, data=ranks.data_size // replicas, tensor=ranks.tensor_size, replicas=replicas)


def _gathered(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _own_columns(down: torch.Tensor) -> torch.Tensor:
    """All rows of A that belong to this rank's columns of W: FSDP shards the rows, tensor parallelism the columns."""
    if not isinstance(down, DTensor):
        return down
    names = down.device_mesh.mesh_dim_names or ()
    placements = [kept if name == TENSOR else Replicate() for name, kept in zip(names, down.placements, strict=True)]
    return down.redistribute(placements=placements).to_local()


def _tensor_dim(parameter: torch.Tensor) -> int | None:
    """The dimension that tensor parallelism divides; None if it does not."""
    if not isinstance(parameter, DTensor):
        return None
    for name, placement in zip(parameter.device_mesh.mesh_dim_names or (), parameter.placements, strict=True):
        if name == TENSOR and isinstance(placement, Shard):
            return int(placement.dim)
    return None


def _sum_gradients(module: FSDPModule) -> None:
    """Sums gradients over the ranks instead of averaging them."""
    module.set_gradient_divide_factor(1.0)
    # The factor alone would use a pre-multiplied sum, which gloo does not support.
    module.set_force_sum_reduction_for_comms(True)
