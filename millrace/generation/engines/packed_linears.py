"""A model's linear layers on a CPU, with weights laid out as oneDNN's matrix products read them.

A plain product lays its weight out at each call. While a few rows are decoded, that takes half as long as the product
itself, or as long. A second copy of the weights in memory saves this time.
"""

from pathlib import Path

import torch
from torch import nn

_ROWS = 32
"""The layout is chosen for this many rows. It differs little between 16 and 64, and helps thousands of rows as well."""
_MIN_WEIGHTS, _MIN_WEIGHTS_INTEL = 2**16, 2**19
"""Packing does not pay for smaller weights, because a call of oneDNN's takes up to 60 µs more than a plain product.
Those are MKL's, which is faster on Intel's CPUs: with layers of 256 × 768, packing made an engine 10 % faster on an AMD
CPU, and 20 % slower on an Intel CPU."""


def pack_linears(model: nn.Module, cpu: Path = Path("/proc/cpuinfo")) -> None:
    """Has the linear layers of `model` use packed weights wherever they compute in float32 on a CPU without gradients.

    A layer whose weight was changed or replaced packs it anew when it is used next. The tensor's version shows it.
    Fused optimizers do not count the version up, so none of them may train `model`. Results change by rounding only.
    `cpu` is Linux's description of the CPU; elsewhere there is none.
    """
    is_intel = cpu.exists() and "GenuineIntel" in cpu.read_text(encoding="utf-8")
    min_weights = _MIN_WEIGHTS_INTEL if is_intel else _MIN_WEIGHTS
    if torch.backends.mkldnn.is_available():
        for module in model.modules():
            # Subclasses define other forward passes.
            if type(module) is nn.Linear and module.weight.numel() >= min_weights:
                module.forward = _PackedLinear(module).forward  # type: ignore[method-assign]


class _PackedLinear:
    """A linear layer's forward pass."""

    def __init__(self, linear: nn.Linear) -> None:
        self._linear = linear
        self._plain = linear.forward
        self._packed = torch.empty(0)
        self._packed_from = (0, 0)
        """Address and version of the weight that was packed."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:  # as nn.Linear calls it
        weight, bias = self._linear.weight, self._linear.bias
        if torch.is_grad_enabled() or weight.dtype != torch.float32 or weight.device.type != "cpu":
            return self._plain(input)
        source = weight.data_ptr(), weight._version
        if source != self._packed_from:
            self._packed = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), _ROWS)
            self._packed_from = source
        output: torch.Tensor = torch.ops.mkldnn._linear_pointwise(input, self._packed, bias, "none", [], "")
        return output
