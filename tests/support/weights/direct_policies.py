"""Policies that trainers of `direct` push: their shapes, how trainer ranks divide them, and the values of a version."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from millrace.weights.base import WeightsId
from millrace.weights.direct.layout import ShardLayout, TensorSpec


@dataclass(frozen=True)
class PushedPolicy:
    """Named tensors of the same shapes in each version."""

    specs: tuple[TensorSpec, ...]

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """A version's values; its number is the seed."""
        random = torch.Generator().manual_seed(version)
        return {
            spec.name: torch.randn(spec.shape, generator=random).mul(0.2).to(getattr(torch, spec.dtype))
            for spec in self.specs
        }

    def layout(self, data: int, tensor: int = 1) -> ShardLayout:
        """The layout of a trainer of data · tensor ranks."""
        return ShardLayout(self.specs, data, tensor)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors(0).values())


def layout_of(tensors: Mapping[str, torch.Tensor], size: int) -> ShardLayout:
    """The layout of a trainer of `size` ranks that shard these."""
    specs = (
        TensorSpec(name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape))
        for name, tensor in tensors.items()
    )
    return ShardLayout(tuple(specs), size)


def shards(tensors: Mapping[str, torch.Tensor], layout: ShardLayout, rank: int) -> dict[str, torch.Tensor]:
    """A rank's parts."""
    return {
        name: tensors[name][tuple(slice(begin, end) for begin, end in box)] for name, box in layout.boxes(rank).items()
    }


def id_of(version: int) -> WeightsId:
    return WeightsId(incarnation=0, policy_version=version, t_offered=version + 0.5)


LLAMA_CONFIG: dict[str, Any] = {
    "vocab_size": 131,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 64,
    "tie_word_embeddings": False,
}
"""Grouped queries with heads that vLLM knows on a CPU, and a vocabulary that nothing divides."""


def _llama() -> PushedPolicy:
    hidden, features, vocabulary = (LLAMA_CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (LLAMA_CONFIG[f"num_{key}_heads"] * LLAMA_CONFIG["head_dim"] for key in ("attention", "key_value"))
    layer: dict[str, tuple[tuple[int, ...], int | None]] = {
        "self_attn.q_proj": ((queries, hidden), 0),
        "self_attn.k_proj": ((keys, hidden), 0),
        "self_attn.v_proj": ((keys, hidden), 0),
        "self_attn.o_proj": ((hidden, queries), 1),
        "mlp.gate_proj": ((features, hidden), 0),
        "mlp.up_proj": ((features, hidden), 0),
        "mlp.down_proj": ((hidden, features), 1),
        "input_layernorm": ((hidden,), None),
        "post_attention_layernorm": ((hidden,), None),
    }
    layers = [
        TensorSpec(f"model.layers.{number}.{name}.weight", "float32", shape, dim)
        for number in range(LLAMA_CONFIG["num_hidden_layers"])
        for name, (shape, dim) in layer.items()
    ]
    return PushedPolicy(
        (
            TensorSpec("model.embed_tokens.weight", "float32", (vocabulary, hidden)),
            *layers,
            TensorSpec("model.norm.weight", "float32", (hidden,)),
            TensorSpec("lm_head.weight", "float32", (vocabulary, hidden)),
        )
    )


POLICIES = {
    "odd": PushedPolicy(
        (
            TensorSpec("embed", "float32", (3001, 100)),
            TensorSpec("scale", "float32", ()),
            TensorSpec("norm", "bfloat16", (3,)),
            TensorSpec("head", "bfloat16", (700, 1000)),
            TensorSpec("bias", "float64", (5, 3)),
        )
    ),
    "llama": _llama(),
    "large": PushedPolicy(
        tuple(TensorSpec(f"layers.{number}.weight", "float32", (2048, 1024)) for number in range(32)),
    ),
}
"""`odd`: several types and odd sizes. `large`: 268 MB, large compared with a process's other memory."""
