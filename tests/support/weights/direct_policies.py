"""Policies that trainers of `direct` push: their shapes, how trainer ranks divide them, and the values of a version."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from millrace.weights.transfer.layout import Layout, TensorSpec
from millrace.weights.transfer.trainer_layouts import fsdp_layout


@dataclass(frozen=True)
class PushedPolicy:
    """Named tensors of the same shapes in each version."""

    specs: tuple[TensorSpec, ...]
    tensor_dims: Mapping[str, int] = field(default_factory=dict)
    """Along which dimension tensor ranks divide a tensor; the others are on all of them."""

    def tensors(self, version: int) -> dict[str, torch.Tensor]:
        """A version's values; its number is the seed."""
        random = torch.Generator().manual_seed(version)
        return {
            spec.name: torch.randn(spec.shape, generator=random).mul(0.2).to(getattr(torch, spec.dtype))
            for spec in self.specs
        }

    def layout(self, data: int, tensor: int) -> Layout:
        """Of a trainer of data · tensor ranks."""
        return fsdp_layout(self.specs, data=data, tensor=tensor, tensor_dims=self.tensor_dims)

    @property
    def nbytes(self) -> int:
        """Of a version."""
        whole = fsdp_layout(self.specs, data=1)
        return whole.nbytes(0)


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
_DIVIDED = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"), 0),
    **dict.fromkeys(("o_proj", "down_proj"), 1),
}


def _llama() -> PushedPolicy:
    hidden, features, vocabulary = (LLAMA_CONFIG[key] for key in ("hidden_size", "intermediate_size", "vocab_size"))
    queries, keys = (LLAMA_CONFIG[f"num_{key}_heads"] * LLAMA_CONFIG["head_dim"] for key in ("attention", "key_value"))
    layer = {
        "self_attn.q_proj": (queries, hidden),
        "self_attn.k_proj": (keys, hidden),
        "self_attn.v_proj": (keys, hidden),
        "self_attn.o_proj": (hidden, queries),
        "mlp.gate_proj": (features, hidden),
        "mlp.up_proj": (features, hidden),
        "mlp.down_proj": (hidden, features),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for number in range(LLAMA_CONFIG["num_hidden_layers"]):
        shapes |= {f"model.layers.{number}.{name}.weight": shape for name, shape in layer.items()}
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    divided = {name: dim for name in shapes for part, dim in _DIVIDED.items() if f".{part}." in name}
    return PushedPolicy(tuple(TensorSpec(name, "float32", shape) for name, shape in shapes.items()), divided)


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
"""`odd`: several types and odd sizes. `large`: 268 MB, beside which a process's own memory is small."""
