"""New weights in a vLLM worker: from a file in shared memory into the model, repacked as its kernels want them.

    start ─► update: map the file ─► layer by layer: load (this rank's share), repack ─► finish: attention, unwrap

The generator's process has verified every byte before it says where they lie, and holds them still until this is done.
Every rank of a tensor-parallel group maps the same pages and copies its own share only.
"""

import logging
from dataclasses import dataclass
from typing import Any

from torch import nn
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

from millrace.errors import WeightsMismatch
from millrace.weights.fingerprint import names_of
from millrace.weights.shared import SharedTensors

# At every update it warns of layers that have no weights of their own to load, such as rotary embeddings. What is
# missing in earnest `receive_weights` finds, and says by name.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class Init(WeightTransferInitInfo):
    """Nothing is agreed on beforehand."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """One version."""

    tensors: dict[str, Any]
    """`SharedTensors` as JSON."""


class SharedMemoryEngine(WeightTransferEngine[Init, Update]):
    """Loads weights that lie in shared memory."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        """There is no connection to make."""

    def start_weight_update(self) -> None:
        """The model is not touched before its new weights are at hand."""

    def receive_weights(self, update_info: Update) -> None:
        """Loads them. Raises WeightsMismatch where some parameter of the model got no value."""
        tensors = SharedTensors.from_json(update_info.tensors).map()
        # Named before the reload, which parts tied parameters for its time.
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(tensors.items())
        if loaded is not None and (missing := expected - loaded):
            raise WeightsMismatch(f"vLLM's model got no value for {names_of(sorted(missing))}")

    def finish_weight_update(self) -> None:
        """Ends the reload; from here on the new weights are live."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in _tied(self.model):
            # The reload gives a tied layer its weights back, but not what its kernel made of them: on a CPU, the
            # output layer of a model with tied embeddings would go on with its first weights for ever.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Nothing is held open."""


def _tied(model: nn.Module) -> list[Any]:
    """Layers that share a parameter with one before them, and repack their weights."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen and hasattr(layer, "quant_method"):
            tied.append(layer)
        seen |= own
    return tied
