"""What a vLLM worker computes with: read back out of its kernels. Runs in vLLM's workers, as their extension class.

linear layers   identity matrix ─► the kernel ─► its weight, transposed: each sum has one term that is not 0
the rest        their parameters
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from millrace.weights.fingerprint import fingerprint

EXTENSION = f"{__name__}.LiveWeights"
_BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_BY_COLUMNS = ("o_proj", "down_proj")
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY_PADDING = 64


class LiveWeights:
    """Methods for vLLM's `collective_rpc`."""

    def live_digests(self) -> dict[str, str]:
        """A hash of each tensor, under vLLM's names."""
        model: nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        with torch.no_grad():
            return dict(fingerprint(dict(_live(model))).tensors)


def expected_digests(tensors: Mapping[str, torch.Tensor], worker: int, workers: int) -> dict[str, str]:
    """What a worker's `live_digests` must be after the version `tensors` of a Llama with as many key-value heads."""
    parts = dict(tensors)
    for name, whole in tensors.items():
        if name.split(".")[-2] in _BY_ROWS:
            parts[name] = whole.chunk(workers)[worker]
        elif name.split(".")[-2] in _BY_COLUMNS:
            parts[name] = whole.chunk(workers, dim=1)[worker].contiguous()
        elif name.split(".")[-2] in ("embed_tokens", "lm_head"):
            padded = torch.nn.functional.pad(whole, (0, 0, 0, -len(whole) % _VOCABULARY_PADDING))
            parts[name] = padded.chunk(workers)[worker]
    for fused, (first, *others) in _FUSED.items():
        for name in [name for name in parts if f".{first}." in name]:
            rows = [parts.pop(name), *(parts.pop(name.replace(first, other)) for other in others)]
            parts[name.replace(first, fused)] = torch.cat(rows)
    return dict(fingerprint(parts).tensors)


def _live(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for name, module in model.named_modules():
        columns = getattr(module, "input_size_per_partition", getattr(module, "input_size", None))
        if columns is not None:
            made = module.quant_method.apply(module, torch.eye(columns))  # type: ignore[union-attr, operator]
            yield f"{name}.weight", made.T.contiguous()
            continue
        for own, parameter in module.named_parameters(recurse=False):
            yield f"{name}.{own}", parameter.detach()
