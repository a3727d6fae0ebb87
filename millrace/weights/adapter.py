"""A LoRA adapter on its way to generators: A and B of each adapted layer, by the names in PEFT's files.

model.layers.0.self_attn.q_proj.weight [out, in], which does not travel
    ├─► base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight [rank, in]
    └─► base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight [out, rank]

generator    transformers: W + (alpha / rank) · B · A in place of W; vLLM: a `LoRARequest` with a folder of PEFT's
"""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

TENSORS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"
"""PEFT's names of an adapter's two files."""
_LAYER = re.compile(r"\.layers\.(\d+)\.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Adapter:
    """Describes an adapter, as PEFT's configuration does. Travels in the manifest."""

    rank: int
    alpha: float
    """Outputs of the adapter are scaled by alpha / rank, no unit."""
    target_modules: tuple[str, ...]
    """Names of the linear layers with an adapter."""
    frozen_layers: int = 0
    """Number of decoder layers, counted from the first, without an adapter."""

    @property
    def scaling(self) -> float:
        """alpha / rank."""
        return self.alpha / self.rank

    def adapts(self, weight: str) -> bool:
        """Whether the parameter `weight` of the base model has an A and a B."""
        module, _, kind = weight.rpartition(".")
        if kind != "weight" or module.rpartition(".")[2] not in self.target_modules:
            return False
        layer = _LAYER.search(weight)
        return self.frozen_layers == 0 or (layer is not None and int(layer[1]) >= self.frozen_layers)

    def shapes(self, base: Mapping[str, torch.Size]) -> dict[str, torch.Size]:
        """Shapes of all A and B by name; `base` are those of the base model's parameters."""
        shapes: dict[str, torch.Size] = {}
        for weight in filter(self.adapts, base):
            num_outputs, num_inputs = base[weight]
            down, up = peft_names(weight)
            shapes |= {down: torch.Size([self.rank, num_inputs]), up: torch.Size([num_outputs, self.rank])}
        return shapes

    def files(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
        """PEFT's two files. PEFT and vLLM load a folder that holds both."""
        whole = {name: tensor.contiguous() for name, tensor in tensors.items()}
        return {TENSORS_FILE: safetensors.torch.save(whole, {"format": "pt"}), CONFIG_FILE: self._config(tensors)}

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> None:
        """Writes PEFT's two files to an existing folder."""
        for name, data in self.files(tensors).items():
            (folder / name).write_bytes(data)

    def _config(self, names: Iterable[str]) -> bytes:
        layers = sorted({int(layer[1]) for name in names if (layer := _LAYER.search(name))})
        values = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "r": self.rank,
            "lora_alpha": self.alpha,
            "target_modules": list(self.target_modules),
            "layers_to_transform": layers if self.frozen_layers else None,
            "layers_pattern": "layers" if self.frozen_layers else None,
            "lora_dropout": 0.0,
            "bias": "none",
            "base_model_name_or_path": None,
            "inference_mode": True,
        }
        return json.dumps(values, indent=2).encode()


def peft_names(weight: str) -> tuple[str, str]:
    """PEFT's names of A and B of the base model's parameter `weight`."""
    module = f"base_model.model.{weight.removesuffix('.weight')}"
    return f"{module}.lora_A.weight", f"{module}.lora_B.weight"


def merged(weight: torch.Tensor, down: torch.Tensor, up: torch.Tensor, scaling: float) -> torch.Tensor:
    """W + (alpha / rank) · B · A, in W's dtype; summed in float32 at least."""
    wide = torch.promote_types(weight.dtype, torch.float32)
    return (weight.to(wide) + up.to(wide) @ down.to(wide) * scaling).to(weight.dtype)
