"""New weights in a vLLM worker: from a file in shared memory into the model, repacked for its kernels.

    start ─► update: map the file ─► layer by layer: load (this rank's share), repack ─► finish: attention, unwrap

The generator's process verifies every byte before it names the file, and does not change the file until this is done.
Every rank of a tensor-parallel group maps the same pages and copies only its own share.
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
from millrace.weights.shared_tensors import SharedTensors

# It warns at every update of layers without own weights, such as rotary embeddings. `receive_weights` itself reports
# parameters that are really missing.
logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)


@dataclass
class Init(WeightTransferInitInfo):
    """No settings are needed."""


@dataclass
class Update(WeightTransferUpdateInfo):
    """One policy version."""

    tensors: dict[str, Any]
    """`SharedTensors` as JSON."""


class SharedMemoryEngine(WeightTransferEngine[Init, Update]):
    """Loads weights from shared memory."""

    init_info_cls = Init
    update_info_cls = Update

    def init_transfer_engine(self, init_info: Init) -> None:
        """Does nothing: there is no connection."""

    def start_weight_update(self) -> None:
        """Does nothing: the model stays as it is until the new weights are there."""

    def receive_weights(self, update_info: Update) -> None:
        """Loads the weights. Raises WeightsMismatch if a parameter of the model got no value."""
        tensors = SharedTensors.from_json(update_info.tensors).map()
        # Before the reload, which separates tied parameters temporarily.
        expected = {name for name, _ in self.model.named_parameters()}
        initialize_layerwise_reload(self.model)
        loaded = self.model.load_weights(tensors.items())
        if loaded is not None and (missing := expected - loaded):
            raise WeightsMismatch(f"vLLM's model got no value for {names_of(sorted(missing))}")

    def finish_weight_update(self) -> None:
        """Ends the reload; the new weights are live."""
        finalize_layerwise_reload(self.model, self.model_config)
        for layer in _tied(self.model):
            # The reload restores the weights of a tied layer, but not the copy that its kernel repacked: on a CPU, the
            # output layer of a model with tied embeddings would keep its first weights for ever.
            layer.quant_method.process_weights_after_loading(layer)

    def shutdown(self) -> None:
        """Does nothing: nothing is open."""


def _tied(model: nn.Module) -> list[Any]:
    """Layers that share a parameter with an earlier one, and repack their weights."""
    seen: set[int] = set()
    tied = []
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        if own & seen and hasattr(layer, "quant_method"):
            tied.append(layer)
        seen |= own
    return tied
