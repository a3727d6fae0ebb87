"""Records which experts computed each token, for trainers that route by them (R3, arXiv 2510.11370)."""

from typing import Any

import torch
from torch import nn

from millrace.models.routers import routers


class ExpertRecorder:
    """Listens to the routers of a model from now on."""

    def __init__(self, model: nn.Module) -> None:
        """Raises ValueError for a model without experts."""
        self._by_layer: list[torch.Tensor] = []
        found = routers(model)
        if not found:
            raise ValueError("the model has no experts to record")
        for router in found:
            router.register_forward_hook(self._routed)

    def take(self) -> torch.Tensor:
        """[T, layers, k] uint16 on the CPU: experts of the tokens of the forward pass since the last call."""
        experts_TLK = torch.stack(self._by_layer, dim=1)
        self._by_layer.clear()
        # No model has as many experts as there are ids.
        return experts_TLK.cpu().to(torch.uint16)

    def _routed(self, router: nn.Module, inputs: Any, output: tuple[torch.Tensor, ...]) -> None:
        self._by_layer.append(output[2])
