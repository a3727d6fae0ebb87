"""Policies whose versions are pushed: any number of parameters, in the tensors of a Llama.

FlippedPolicy   v ─► −v ─► v          another bit in every element: nothing to save for a delta
TrainedPolicy   float32 masters ─► AdamW, random gradients ─► cast to bfloat16: like a run at a small learning rate
"""

from collections.abc import Mapping
from typing import Protocol

import torch

_VOCAB = 32_000
_INITIALIZER_STD = 0.02
_SEED = 0
_LEARNING_RATE = 1e-6
_WARM_UP_STEPS = 10
"""AdamW's first steps move every element by the learning rate, later ones by less."""

Shapes = Mapping[str, tuple[int, ...]]
"""Parameter name → shape."""


class Policy(Protocol):
    """A trainer's parameters."""

    tensors: dict[str, torch.Tensor]
    """By name, in the dtype of generation."""

    def step(self) -> None:
        """Makes these the next version, in place."""


class FlippedPolicy:
    """Tensors of these shapes; each version flips all signs of the one before."""

    def __init__(self, shapes: Shapes, dtype: torch.dtype, device: str = "cpu") -> None:
        self.tensors = _random(shapes, dtype, device)

    def step(self) -> None:
        for tensor in self.tensors.values():
            tensor.neg_()


class TrainedPolicy:
    """bfloat16 tensors, cast from float32 masters that AdamW moves at a learning rate of 1e-6, with default betas.

    Gradients are random, from a fixed seed; a few steps precede the first version.
    """

    def __init__(self, shapes: Shapes) -> None:
        self._masters = _random(shapes, torch.float32, "cpu")
        self._random = torch.Generator().manual_seed(_SEED)
        self._optimizer = torch.optim.AdamW(self._masters.values(), lr=_LEARNING_RATE)
        self.tensors = {name: torch.empty_like(master, dtype=torch.bfloat16) for name, master in self._masters.items()}
        for _ in range(_WARM_UP_STEPS):
            self.step()

    def step(self) -> None:
        for master in self._masters.values():
            master.grad = torch.randn(master.shape, generator=self._random)
        self._optimizer.step()
        self._optimizer.zero_grad()
        for name, master in self._masters.items():
            self.tensors[name].copy_(master)


def llama_shapes(num_parameters: int) -> dict[str, tuple[int, ...]]:
    """Shapes of a Llama with about this many parameters and tied embeddings; a toy below some ten million."""
    hidden, layers = _size(num_parameters)
    intermediate = 8 * hidden // 3
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (_vocab(hidden), hidden)}
    for i in range(layers):
        prefix = f"model.layers.{i}"
        for part in "qkvo":
            shapes[f"{prefix}.self_attn.{part}_proj.weight"] = (hidden, hidden)
        shapes[f"{prefix}.mlp.gate_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.mlp.up_proj.weight"] = (intermediate, hidden)
        shapes[f"{prefix}.mlp.down_proj.weight"] = (hidden, intermediate)
        shapes[f"{prefix}.input_layernorm.weight"] = (hidden,)
        shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
    return shapes | {"model.norm.weight": (hidden,)}


def _size(num_parameters: int) -> tuple[int, int]:
    """Hidden size and number of layers: about 64 features per layer, as in models of 0.1 to 10 billion parameters."""
    size = (16, 1)
    for hidden in range(16, 8192, 16):
        # A layer has 4 h² in its attention and 8 h² in its MLP.
        layers = round((num_parameters - hidden * _vocab(hidden)) / (12 * hidden**2))
        if layers < max(1, hidden // 64):
            break
        size = (hidden, layers)
    return size


def _vocab(hidden: int) -> int:
    return min(_VOCAB, 60 * hidden)


def _random(shapes: Shapes, dtype: torch.dtype, device: str) -> dict[str, torch.Tensor]:
    """Matrices as they are initialized, and norms of ones."""
    random = torch.Generator(device).manual_seed(_SEED)
    return {
        name: torch.empty(shape, dtype=dtype, device=device).normal_(0.0, _INITIALIZER_STD, generator=random)
        if len(shape) > 1
        else torch.ones(shape, dtype=dtype, device=device)
        for name, shape in shapes.items()
    }
