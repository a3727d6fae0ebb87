"""Tensor parallelism: the ranks of a row share each layer's heads and features, as DTensors.

    hidden ─► q, k, v: a share of the heads ─► attention of these heads ─► o: a summand ──sum over the row──► hidden
    hidden ─► gate, up: a share of the features ─► their products ─► down: a summand ──sum over the row──► hidden

Between these the hidden states are whole on every rank. Weights of embeddings, norms and the output head are replicated
DTensors, because an optimizer and a norm of the gradient can't mix parameters of several meshes. The plan is that of
Megatron-LM (arXiv 1909.08053, section 3).
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
_NORMS = (
    "input_layernorm",
    "post_attention_layernorm",
    # Gemma 2 and 3.
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_HEAD_NORMS = ("self_attn.q_norm", "self_attn.k_norm")
"""Qwen 3 and Gemma 3: one weight for all heads; each rank applies it to its own heads."""
_HEADS_DIM = 2
"""Dimension of the heads in the inputs of these norms: [1, S, heads, head_dim]."""


class _Replicated(ParallelStyle):
    """A module whose weights every rank of the row holds; its input is whole on each rank, or each rank's part."""

    def __init__(self, input_placement: Placement | None = None) -> None:
        self._input_placements = [input_placement or Replicate()]

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        # Annotated as returning nothing, but what hooks return replaces input and output.
        return distribute_module(module, device_mesh, None, self._placed, _local)  # type: ignore[arg-type]

    def _placed(self, module: nn.Module, inputs: tuple[Any, ...], row: DeviceMesh) -> tuple[Any, ...]:
        first, *rest = inputs
        if not isinstance(first, DTensor):
            first = DTensor.from_local(first, row, self._input_placements, run_check=False)
        return (first, *rest)


def split_layer(layer: nn.Module, name: str, row: DeviceMesh) -> None:
    """Divides a decoder layer and its adapters among the ranks of `row`; `name` is the layer's in its model.

    Every rank must hold the same weights. Raises InputError for a module that is not in the plan.
    """
    plan = _plan()
    weighted = {
        path: module for path, module in layer.named_modules() if any(True for _ in module.parameters(recurse=False))
    }
    for path, module in weighted.items():
        if path not in plan:
            raise InputError(
                f"{name}.{path}, a {type(module).__name__}, can't be divided among tensor ranks",
                expected="layers like Llama's, or a training.parallel.tensor of 1 (docs/models.md)",
            )
    for path in set(_HEAD_NORMS) & set(weighted):
        features = weighted[path].get_parameter("weight").numel()
        if features != layer.get_submodule("self_attn").head_dim:
            raise InputError(
                f"{name}.{path} has weights for {features} features",
                expected="those of a single head, like Qwen3's, or a training.parallel.tensor of 1",
            )
    # Each rank has read the same files, so nothing has to be scattered.
    styles = {path: style for path, style in plan.items() if path in weighted or path in _INPUTS}
    parallelize_module(layer, row, styles, src_data_rank=None)


def replicate(modules: list[nn.Module], row: DeviceMesh) -> None:
    """Replicates these modules on every rank of `row`; parameters that they share stay shared."""
    made: dict[Tensor, nn.Parameter] = {}
    for module in modules:
        parameters = dict(module.named_parameters(recurse=False))
        parallelize_module(module, row, _Replicated())
        for name, parameter in parameters.items():
            module.register_parameter(name, made.setdefault(parameter, module.get_parameter(name)))


def _plan() -> dict[str, ParallelStyle]:
    """The style of each module of a layer, by its path. An input is distributed once for all modules that share it."""
    plan: dict[str, ParallelStyle] = {
        "self_attn": PrepareModuleInput(
            input_kwarg_layouts={"hidden_states": Replicate()},
            desired_input_kwarg_layouts={"hidden_states": Replicate()},
        ),
        "mlp": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=Replicate()),
    }
    # An adapter is divided like its layer: by columns in B, by rows in A.
    for path in _COLUMNS:
        plan |= {path: ColwiseParallel(), f"{path}.base_layer": ColwiseParallel()}
        plan |= {f"{path}.lora_A.default": _Replicated(), f"{path}.lora_B.default": ColwiseParallel()}
    for path in _ROWS:
        plan |= {path: RowwiseParallel(), f"{path}.base_layer": RowwiseParallel()}
        plan |= {f"{path}.lora_A.default": RowwiseParallel(), f"{path}.lora_B.default": _Replicated()}
    plan |= {path: _Replicated() for path in _NORMS}
    # Each rank has the part of the gradient that comes from its own heads; DTensor sums the parts.
    plan |= {path: _Replicated(Shard(_HEADS_DIM)) for path in _HEAD_NORMS}
    return plan


def _local(module: nn.Module, output: DTensor, row: DeviceMesh) -> Tensor:
    return output.to_local()
