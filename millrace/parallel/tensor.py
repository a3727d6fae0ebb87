"""Tensor parallel: each layer's heads and features are divided among the ranks of a row, as DTensors.

    hidden ─► q, k, v: a share of the heads ─► attention of these heads ─► o: a summand ──sum over the row──► hidden
    hidden ─► gate, up: a share of the features ─► their products ─► down: a summand ──sum over the row──► hidden

Between these the hidden states are whole on every rank: embeddings, norms and the output head compute alike
everywhere. They are DTensors all the same, replicated ones, for an optimizer and a norm of the gradient can't mix
parameters of several meshes. The plan is that of Megatron-LM (arXiv 1909.08053, section 3).
"""

from typing import Any

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_module
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

from millrace.errors import InputError

_INPUTS = ("self_attn", "mlp")
_COLUMNS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
_ROWS = ("self_attn.o_proj", "mlp.down_proj")
_NORMS = ("input_layernorm", "post_attention_layernorm")
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Of Qwen3: one weight for all heads, each rank applies it to its own."""
_HEADS_DIM = 2
"""Of the queries and keys where these norms see them: [1, S, heads, head_dim]."""


class _Replicated(ParallelStyle):
    """A module whose weights every rank of the row holds, on an input that each has whole, or its part of."""

    def __init__(self, given: Placement | None = None) -> None:
        self._given = [given or Replicate()]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Their annotations say that hooks return nothing; what these return takes the place of input and output.
        return distribute_module(module, device_mesh, None, self._placed, _local)  # type: ignore[arg-type]

    def _placed(self, module: nn.Module, inputs: tuple[Any, ...], row: DeviceMesh) -> tuple[Any, ...]:
        first, *others = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, row, self._given, run_check=False)
        return (first, *others)


def split_layer(layer: nn.Module, name: str, row: DeviceMesh) -> None:
    """Divides a decoder layer, `name` in its model, among the ranks of `row`; adapters that it holds with it.

    Every rank must hold the same weights. Raises InputError naming a module that the plan above does not know.
    """
    plan = _plan()
    weighted = {
        path: module for path, module in layer.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    for path, module in weighted.items():
        if path not in plan:
            raise InputError(
                f"{name}.{path}, a {type(module).__name__}, can't be divided among tensor ranks; "
                "expected layers as those of Llama, Mistral, Qwen2 or Qwen3, or a training.parallel.tensor of 1"
            )
    for path in set(_HEAD_NORMS) & set(weighted):
        features = weighted[path].get_parameter("weight").numel()
        if features != layer.get_submodule("self_attn").head_dim:
            raise InputError(
                f"{name}.{path} has weights for {features} features; expected those of a single head, as Qwen3's, "
                "or a training.parallel.tensor of 1"
            )
    # Each rank has read the same files, so no shares need to be sent.
    there = {path: style for path, style in plan.items() if path in weighted or path in _INPUTS}
    parallelize_module(layer, row, there, src_data_rank=None)


def replicate(modules: list[nn.Module], row: DeviceMesh) -> None:
    """Lets every rank of `row` hold and compute all of these modules; parameters that they share stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in modules:
        own = dict(module.named_parameters(recurse=False))
        parallelize_module(module, row, _Replicated())
        for name, parameter in own.items():
            module.register_parameter(name, made.setdefault(parameter, module.get_parameter(name)))


def whole(parameter: Tensor) -> Tensor:
    """The values of a replicated parameter, for code that knows no DTensor; anything else as it is."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


def _plan() -> dict[str, ParallelStyle]:
    """The style of each module of a layer, by its path. Both inputs are sent once for all that share them."""
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    }
    # An adapter goes the way of the layer that it stands beside: what is divided there is divided in A or in B.
    for path in _COLUMNS:
        plan |= {path: ColwiseParallel(), f"{path}.base_layer": ColwiseParallel()}
        plan |= {f"{path}.lora_A.default": _Replicated(), f"{path}.lora_B.default": ColwiseParallel()}
    for path in _ROWS:
        plan |= {path: RowwiseParallel(), f"{path}.base_layer": RowwiseParallel()}
        plan |= {f"{path}.lora_A.default": RowwiseParallel(), f"{path}.lora_B.default": _Replicated()}
    plan |= {path: _Replicated() for path in _NORMS}
    # On its own heads a rank sees a part of the weight's gradient: DTensor adds these up.
    plan |= {path: _Replicated(Shard(_HEADS_DIM)) for path in _HEAD_NORMS}
    return plan


def _local(module: nn.Module, output: DTensor, row: DeviceMesh) -> Tensor:
    return output.to_local()
