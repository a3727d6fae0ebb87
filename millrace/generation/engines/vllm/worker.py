"""New weights in a vLLM worker: from a file in shared memory into the model, repacked for its kernels.

    start ─► update: map the file ─► layer by layer: load (this rank's share), repack ─► finish: attention, unwrap

The generator's process verifies every byte before it names the file, and does not change the file until this is done.
Every rank of a tensor-parallel group maps the same pages and copies only its own share.
"""

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import revert_weight_conversion
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from millrace.generation.engines.vllm.reload_audit import begin_reload, check_reload
from millrace.models.loading import empty_model
from millrace.weights.shared_tensors import SharedTensors

# It warns at every update of layers without own weights, such as rotary embeddings. `check_reload` reports the others.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class Update(WeightTransferUpdateInfo):
    """One policy version."""

    tensors: dict[str, Any]
    """`SharedTensors` as JSON."""


class SharedMemoryEngine(WeightTransferEngine[WeightTransferInitInfo, Update]):
    """Loads weights from shared memory."""

    init_info_cls = WeightTransferInitInfo
    update_info_cls = Update

    def init_transfer_engine(self, init_info: WeightTransferInitInfo) -> None:
        """Does nothing: weights arrive without a connection."""

    def start_weight_update(self) -> None:
        """Does nothing: the model stays as it is until the new weights arrive."""

    def receive_weights(self, update_info: Update) -> None:
        """Loads the weights. Raises WeightsMismatch if a layer did not receive all of them."""
        tensors = SharedTensors.from_json(update_info.tensors).map()
        begin_reload()
        initialize_layerwise_reload(self.model)
        for method in experts_on_a_cpu(self.model):
            # With a kernel in place, vLLM 0.32 takes the experts' weights for new ones of a GPU and does not repack
            # them for the CPU's kernel, which then reads the wrong numbers. Without one it makes both again.
            method.moe_kernel = None
        try:
            self.model.load_weights(as_in_files(tensors, self._skeleton))
            check_reload(self.model)
        except BaseException:
            # Otherwise the next version would be counted together with the part of this one that arrived.
            finalize_layerwise_reload(self.model, self.model_config)
            raise

    def finish_weight_update(self) -> None:
        """Ends the reload; the new weights are live."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in _tied(self.model):
            # The reload restores the weights of a tied layer, but not the copy that its kernel repacked: on a CPU, the
            # output layer of a model with tied embeddings would keep its first weights for ever.
            layer.quant_method.process_weights_after_loading(layer)

    @cached_property
    def _skeleton(self) -> PreTrainedModel:
        """transformers' model without values, which knows the names of parameters and of files."""
        return empty_model(Path(self.model_config.model))

    def shutdown(self) -> None:
        """Does nothing: nothing is open."""


def experts_on_a_cpu(model: nn.Module) -> Iterator[UnquantizedFusedMoEMethod]:
    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod) and method.unquantized_backend == UnquantizedMoeBackend.CPU:
            yield method


def as_in_files(tensors: Mapping[str, torch.Tensor], model: PreTrainedModel) -> Iterator[tuple[str, torch.Tensor]]:
    """The tensors under the names of a model's files, which are those that vLLM knows.

    transformers holds the experts of a layer in one tensor; most files hold each of them in separate tensors.
    """
    # `add_legacy`: renames of very old files, which every model has.
    if not get_model_conversion_mapping(model, add_legacy=False):
        yield from tensors.items()
        return
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
