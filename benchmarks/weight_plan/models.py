"""The tensors of dense models, by name and shape."""

from collections.abc import Sequence
from dataclasses import dataclass

from millrace.weights.transfer.layout import TensorSpec

_COLUMNS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")
_ROWS = ("o_proj", "down_proj")


@dataclass(frozen=True, kw_only=True)
class DenseModel:
    """A decoder like Llama's."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128
    tied: bool = False
    """Whether the output layer is the embedding."""
    head_norms: bool = False
    """Whether queries and keys have a norm, as in Qwen3."""
    trainer_tensor: int = 8
    """Over how many ranks the trainer divides each layer by default."""

    def tensors(self, dtype: str = "bfloat16") -> tuple[TensorSpec, ...]:
        """In the order of transformers' parameters; tied ones once."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in self._layer().items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return tuple(TensorSpec(name, dtype, shape) for name, shape in shapes.items())

    def _layer(self) -> dict[str, tuple[int, ...]]:
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        norms = {"self_attn.q_norm": (self.head_dim,), "self_attn.k_norm": (self.head_dim,)} if self.head_norms else {}
        return {
            "self_attn.q_proj": (queries, self.hidden),
            "self_attn.k_proj": (keys, self.hidden),
            "self_attn.v_proj": (keys, self.hidden),
            "self_attn.o_proj": (self.hidden, queries),
            **norms,
            "mlp.gate_proj": (self.intermediate, self.hidden),
            "mlp.up_proj": (self.intermediate, self.hidden),
            "mlp.down_proj": (self.hidden, self.intermediate),
            "input_layernorm": (self.hidden,),
            "post_attention_layernorm": (self.hidden,),
        }


def tensor_dims(tensors: Sequence[TensorSpec]) -> dict[str, int | None]:
    """Along which dimension the trainer's tensor ranks divide each tensor (`millrace.training.parallel.tensor`)."""
    return {tensor.name: _tensor_dim(tensor.name) for tensor in tensors}


def _tensor_dim(name: str) -> int | None:
    module = name.split(".")[-2]
    if module in _COLUMNS:
        return 0
    return 1 if module in _ROWS else None


QWEN3_4B = DenseModel(
    name="Qwen3 4B",
    layers=36,
    hidden=2560,
    intermediate=9728,
    heads=32,
    kv_heads=8,
    vocabulary=151_936,
    tied=True,
    head_norms=True,
    trainer_tensor=2,
)
LLAMA_8B = DenseModel(
    name="Llama 8B",
    layers=32,
    hidden=4096,
    intermediate=14_336,
    heads=32,
    kv_heads=8,
    vocabulary=128_256,
    trainer_tensor=1,
)
LLAMA_70B = DenseModel(
    name="Llama 70B",
    layers=80,
    hidden=8192,
    intermediate=28_672,
    heads=64,
    kv_heads=8,
    vocabulary=128_256,
)
LLAMA_405B = DenseModel(
    name="Llama 405B",
    layers=126,
    hidden=16_384,
    intermediate=53_248,
    heads=128,
    kv_heads=8,
    vocabulary=128_256,
)
