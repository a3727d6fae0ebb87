"""How vLLM's model takes a new version, and how layers are found that are left without their new weights.

    begin ─► load_weights(as_in_files) ─► check ─► finish
               └ a bare `copy_` in it ends on the meta device, and is lost

A reload moves each layer to the meta device and counts the elements that weight loaders copy. Here each place counts
once, so that a shard that comes twice does not stand in for another. A layer that is complete is processed at once:
repacked, quantized, copied to where the kernels read it. Layers that are not complete in the end get their old tensors
back, or are processed with whatever memory held. vLLM logs the first case and not the second.
"""

import logging
from collections.abc import Callable, Collection, Iterator, Mapping
from itertools import groupby
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from vllm.config import ModelConfig
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, CopyCounter
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from millrace.errors import WeightsMismatch
from millrace.weights.fingerprint import names_of

# It warns at every update of layers without own weights, such as rotary embeddings. `check` reports the others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

_places: Any = WeakIdKeyDictionary()
"""Storages, and where weight loaders have copied into them: offset, shape and strides."""


class _PlaceCounter(CopyCounter):  # type: ignore[misc]
    """Counts elements that are copied to where nothing was copied since `begin`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            places = _places.setdefault(args[0].untyped_storage(), set())
            place = args[0].storage_offset(), args[0].shape, args[0].stride()
            if place in places:
                return func(*args, **(kwargs or {}))
            places.add(place)
        return super().__torch_dispatch__(func, types, args, kwargs)


meta.CopyCounter = _PlaceCounter


def begin(model: nn.Module, initialize: Callable[[], None]) -> None:
    """Begins a reload; `initialize` has vLLM move the layers away."""
    _places.clear()
    initialize()
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend == UnquantizedMoeBackend.CPU:
            # With a kernel in place, vLLM 0.32 takes the experts' weights for new ones of a GPU and does not repack
            # them for the CPU's kernel, which then reads the wrong numbers. Without one it makes both again.
            method.moe_kernel = None


def check(model: nn.Module, written: Collection[str] = ()) -> None:
    """Raises WeightsMismatch, with the layers' names, unless every layer has received all its elements.

    `written`: parameters that were written in place, without weight loaders. Call it after the last `load_weights` and
    before `finalize_layerwise_reload`.
    """
    if incomplete := list(_incomplete_layers(model, written)):
        raise WeightsMismatch(f"vLLM's model did not load all weights of {names_of(incomplete)}")


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


def _incomplete_layers(model: nn.Module, written: Collection[str]) -> Iterator[str]:
    seen: set[int] = set()
    for name, layer in model.named_modules():
        info = get_layerwise_info(layer)
        # A complete layer has its tensors back; the others are on the meta device, with the shapes of model files.
        kernel_tensors = info.kernel_tensors[0] if info.kernel_tensors is not None else dict(layer._parameters)
        # Tied to an earlier layer, which receives the values for both.
        tied = {key for key, parameter in kernel_tensors.items() if id(parameter) in seen}
        seen |= {id(parameter) for parameter in kernel_tensors.values() if parameter is not None}
        # Scales of the key-value cache have defaults.
        if not info.can_load() or isinstance(getattr(layer, "quant_method", None), BaseKVCacheMethod):
            continue
        expected = sum(
            _num_loaded(layer, parameter)
            for key, parameter in layer._parameters.items()
            if parameter is not None and key not in tied | SKIP_LOAD_TENSORS and f"{name}.{key}" not in written
        )
        if info.load_numel < expected:
            yield f"{name} ({info.load_numel} of {expected} elements)"


def _num_loaded(layer: nn.Module, parameter: torch.Tensor) -> int:
    """Elements of a whole parameter without its padding, which no file holds."""
    if isinstance(layer, VocabParallelEmbedding):
        return int(parameter.numel() // len(parameter) * layer.shard_indices.num_org_elements)
    moe = getattr(layer, "moe_config", None)
    if moe is None or hasattr(parameter, "weight_loader_numel") or parameter.dim() != 3:
        return int(get_tensor_load_numel(parameter))
    # vLLM declares the padding of experts unless it quantizes them.
    padded = moe.hidden_dim * moe.intermediate_size_per_partition
    unpadded = moe.hidden_dim_unpadded * moe.intermediate_size_per_partition_unpadded
    return int(parameter.numel() * unpadded // padded)


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
