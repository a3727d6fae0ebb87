"""How vLLM's model takes a new version, layer by layer: names of files, experts on a CPU, tied layers.

begin ─► load_weights(as_in_files) ─► check_reload (`reload_audit.py`) ─► finish
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

from millrace.generation.engines.vllm.reload_audit import begin_audit

# It warns at every update of layers without own weights, such as rotary embeddings. `check_reload` reports the others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


def begin(model: nn.Module, initialize: Callable[[], None]) -> None:
    """Begins a reload; `initialize` has vLLM move the layers away."""
    begin_audit()
    initialize()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend == UnquantizedMoeBackend.CPU:
            # With a kernel in place, vLLM 0.32 takes the experts' weights for new ones of a GPU and does not repack
            # them for the CPU's kernel, which then reads the wrong numbers. Without one it makes both again.
            method.moe_kernel = None


def finish(model: nn.Module, config: ModelConfig) -> None:
    """Ends a reload; the new weights are live."""
    finalize_layerwise_reload(model, config)
    for layer in _tied(model):
        # The reload restores the weights of a tied layer, but not the copy that its kernel repacked: on a CPU, the
        # output layer of a model with tied embeddings would keep its first weights for ever.
        layer.quant_method.process_weights_after_loading(layer)


def as_in_files(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names of the model's files, which are those that vLLM knows.

    transformers holds the experts of a layer in one tensor; most files hold each of them in separate tensors.
    """
    # A layer at a time: converted experts are copies.
    for _, names in groupby(sorted(tensors, key=_layer), key=_layer):
        yield from revert_weight_conversion(model, {name: tensors[name] for name in names}).items()


def _layer(name: str) -> str:
    """`model.layers.3` of `model.layers.3.mlp.experts.down_proj`."""
    return ".".join(name.split(".")[:3])


def _tied(model: nn.Module) -> list[Any]:
    """Layers that share a parameter with an earlier one, and repack their weights."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        parameters = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if parameters & seen and hasattr(layer, "quant_method"):
            tied.append(layer)
        seen |= parameters
    return tied
