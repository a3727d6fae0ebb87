"""What a vLLM worker computes with: read back out of its kernels. Runs in vLLM's workers, as their extension class.

linear layers   identity matrix ─► the kernel ─► its weight, transposed: each sum has one term that is not 0
the rest        their parameters
"""

from collections.abc import Iterator, Mapping

import torch
from torch import nn

from millrace.weights.fingerprint import fingerprint
from millrace.weights.transfer.generator_layouts import vllm_layout
from millrace.weights.transfer.layout import TensorSpec

EXTENSION = f"{__name__}.LiveWeights"
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_VOCABULARY_PADDING = 64


class LiveWeights:
    """Methods for vLLM's `collective_rpc`."""

    def live_digests(self) -> dict[str, str]:
        """A hash of each tensor, under vLLM's names."""
        model: nn.Module = self.model_runner.model  # type: ignore[attr-defined]
        with torch.no_grad():
            return dict(fingerprint(dict(_live(model))).tensors)


def expected_digests(
    tensors: Mapping[str, torch.Tensor], worker: int, workers: int, *, num_heads: int, num_kv_heads: int
) -> dict[str, str]:
    """What a worker's `live_digests` must be after the version `tensors` of a Llama."""
    specs = [TensorSpec(name, "float32", tuple(tensor.shape)) for name, tensor in tensors.items()]
    boxes = vllm_layout(specs, tensor=workers, num_heads=num_heads, num_kv_heads=num_kv_heads).held(worker)
    parts = {
        name: tensors[name][tuple(slice(begin, end) for begin, end in box)].contiguous() for name, box in boxes.items()
    }
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        share = -(-len(tensors[name]) // _VOCABULARY_PADDING) * _VOCABULARY_PADDING // workers
        padding = share - len(parts[name])
        parts[name] = torch.nn.functional.pad(parts[name], (0, 0, 0, padding))
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
