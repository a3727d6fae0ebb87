"""A policy spread over the ranks: what each of them keeps, and how all of it is got together again.

    policy of the model folder ─► each layer divided over a row (tensor.py) ─► each layer and the rest sharded over a
    column (FSDP2): a rank keeps its shard of every weight, gradient and optimizer state in the weights' own type

    forward, backward: a layer's shards are gathered in the compute type ─► used ─► let go; gradients are summed in
    float32, and each rank keeps its shard of the sum

The gradient is the sum over the ranks of a column, never a mean: each token's loss already is its share of the whole
batch (`millrace.objective`). FSDP2: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html.
"""

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from millrace.parallel.lora import adapters, base_name, is_adapter, merged, parts
from millrace.parallel.ranks import DATA, TENSOR, Ranks, mesh_of_one
from millrace.parallel.tensor import replicate, split_layer
from millrace.policy import PackedPolicy


def shard(policy: PackedPolicy, ranks: Ranks, *, compute_dtype: torch.dtype | None = None) -> None:
    """Spreads `policy` over the ranks, in place, and lets it compute in `compute_dtype`, None for the weights' own.

    Every rank calls it with the same weights, on the CPU still, before an optimizer is made. A policy that is alone and
    computes in its own type only goes to the device. Raises InputError naming a module that can't be divided.
    """
    weights_dtype = next(policy.parameters()).dtype
    if ranks.size == 1 and compute_dtype in (None, weights_dtype):
        policy.to(ranks.device)
        return
    mesh = ranks.mesh or mesh_of_one(ranks.device)
    precision = MixedPrecisionPolicy(
        param_dtype=compute_dtype,
        reduce_dtype=torch.promote_types(weights_dtype, torch.float32),
        # What comes in is made in the compute type already, or, as the temperatures, has to stay as it is.
        cast_forward_inputs=False,
    )
    layers = _decoder_layers(policy.model)
    for name, layer in layers.items():
        # One layer after the other, so that a device never holds more than one of them whole.
        if ranks.tensor_size > 1:
            split_layer(layer, name, mesh[TENSOR])
        _sum_up(fully_shard(layer, mesh=mesh[DATA], mp_policy=precision))
    if ranks.tensor_size > 1:
        inside = {module for layer in layers.values() for module in layer.modules()}
        rest = (module for module in policy.modules() if module not in inside)
        replicate([module for module in rest if any(True for _ in module.parameters(recurse=False))], mesh[TENSOR])
    # By default what is in no layer would stay gathered, for a backward pass that may not come: after a look at the
    # policy its parameters would be copies, in the compute type.
    _sum_up(fully_shard(policy, mesh=mesh[DATA], mp_policy=precision, reshard_after_forward=True))
    register_fsdp_forward_method(policy, "over_vocabulary")


@torch.no_grad()
def full_tensors(model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """(name, tensor) of each parameter of the base model, whole and without a gradient, tied ones once.

    Adapters are merged in: W + (alpha / rank) · B · A. Every rank has to take all of them, for each is gathered from
    all ranks when its turn comes; there is never more than one that the caller does not keep. What is neither sharded
    nor adapted is the live parameter itself, which changes with the next step. Nothing live is changed.
    """
    adapted = adapters(model)
    for name, parameter in model.named_parameters():
        if is_adapter(name):
            continue
        tensor = _gathered(parameter)
        if (layer := adapted.get(name)) is not None:
            down, up, scaling = parts(layer)
            tensor = merged(tensor, _gathered(down), _gathered(up), scaling)
        yield base_name(name), tensor


def _decoder_layers(model: PreTrainedModel) -> dict[str, nn.Module]:
    """In order, by name; every kind of model that a `PackedPolicy` takes keeps them in one place."""
    names = {module: name for name, module in model.named_modules()}
    return {names[layer]: layer for layer in model.base_model.get_submodule("layers").children()}


def _gathered(parameter: torch.Tensor) -> torch.Tensor:
    tensor = parameter.detach()
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def _sum_up(module: FSDPModule) -> None:
    """Lets gradients be added up over the ranks as they are."""
    module.set_gradient_divide_factor(1.0)
    # The factor alone would ask for a multiplying reduction, which gloo does not have.
    module.set_force_sum_reduction_for_comms(True)
