"""Finds layers that a reload of vLLM's model has left without their new weights.

A reload moves each layer to the meta device and counts the elements that weight loaders copy. Here each place counts
once, so that a shard that comes twice does not stand in for another. A layer that is complete is processed at once:
repacked, quantized, copied to where the kernels read it. Layers that are not complete in the end get their old tensors
back, or are processed with whatever memory held. vLLM logs the first case and not the second.

    initialize_layerwise_reload ─► load_weights ─► check_reload ─► finalize_layerwise_reload
                                    └ a bare `copy_` in it ends on the meta device, and is lost
"""

from collections.abc import Collection, Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary
from vllm.model_executor.layers.quantization.kv_cache import BaseKVCacheMethod
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import meta
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.meta import SKIP_LOAD_TENSORS, CopyCounter
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from millrace.errors import WeightsMismatch
from millrace.weights.fingerprint import names_of

_places: Any = WeakIdKeyDictionary()
"""Storages, and where weight loaders have copied into them: offset, shape and strides."""


class _PlaceCounter(CopyCounter):  # type: ignore[misc]
    """Counts elements that are copied to where nothing was copied since `begin_audit`."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            places = _places.setdefault(args[0].untyped_storage(), set())
            place = args[0].storage_offset(), args[0].shape, args[0].stride()
            if place in places:
                return func(*args, **(kwargs or {}))
            places.add(place)
        return super().__torch_dispatch__(func, types, args, kwargs)


meta.CopyCounter = _PlaceCounter


begin_audit = _places.clear
"""Call it before `initialize_layerwise_reload`."""


def check_reload(model: nn.Module, written: Collection[str] = ()) -> None:
    """Raises WeightsMismatch, with the layers' names, unless every layer has received all its elements.

    `written`: parameters that were written in place, without weight loaders. Call it after the last `load_weights` and
    before `finalize_layerwise_reload`.
    """
    if incomplete := list(_incomplete_layers(model, written)):
        raise WeightsMismatch(f"vLLM's model did not load all weights of {names_of(incomplete)}")


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
