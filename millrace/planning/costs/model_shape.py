"""The sizes of a model: its tensors, and what a token costs in bytes and in floating point operations."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from configs.schema import BootstrapConfig
from millrace.errors import ModelFolderError
from millrace.weights.direct.layout import TensorSpec
from storage.json_text import parse_json

BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Of a number, by number format."""
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder like Llama's, dense or a mixture of experts."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    """Width of a feed-forward block; in a mixture, of each expert."""
    heads: int
    kv_heads: int
    vocabulary: int
    head_dim: int = 128
    tied: bool = False
    """Whether the output layer is the embedding."""
    head_norms: bool = False
    """Whether queries and keys have a norm, as in Qwen3."""
    qkv_bias: bool = False
    """Whether queries, keys and values have a bias, as in Qwen2."""
    experts: int = 0
    """Experts of each layer; 0: it is dense."""
    experts_per_token: int = 0

    def tensors(self, dtype: str = "bfloat16") -> tuple[TensorSpec, ...]:
        """In the order of transformers' parameters; tied ones once."""
        shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (self.vocabulary, self.hidden)}
        for layer in range(self.layers):
            shapes |= {f"model.layers.{layer}.{name}": shape for name, shape in self.layer_shapes().items()}
        shapes["model.norm.weight"] = (self.hidden,)
        if not self.tied:
            shapes["lm_head.weight"] = (self.vocabulary, self.hidden)
        return tuple(TensorSpec(name, dtype, shape) for name, shape in shapes.items())

    def layer_shapes(self) -> dict[str, tuple[int, ...]]:
        """The shape of each tensor of one layer, by its name there."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        attention: dict[str, tuple[int, ...]] = {}
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            attention[f"self_attn.{name}.weight"] = (rows, self.hidden)
            if self.qkv_bias:
                attention[f"self_attn.{name}.bias"] = (rows,)
        attention["self_attn.o_proj.weight"] = (self.hidden, queries)
        if self.head_norms:
            attention |= {f"self_attn.{name}.weight": (self.head_dim,) for name in ("q_norm", "k_norm")}
        return {
            **attention,
            **(self._experts() if self.experts else self._feed_forward()),
            "input_layernorm.weight": (self.hidden,),
            "post_attention_layernorm.weight": (self.hidden,),
        }

    @property
    def parameters(self) -> int:
        """All of them, tied ones once."""
        return self.layers * self.layer_parameters + self.other_parameters

    @cached_property
    def layer_parameters(self) -> int:
        """Of one layer, all experts included."""
        return sum(math.prod(shape) for shape in self.layer_shapes().values())

    @property
    def other_parameters(self) -> int:
        """Outside of layers: embeddings, the last norm, and the output layer if it is another tensor."""
        return (1 if self.tied else 2) * self.vocabulary * self.hidden + self.hidden

    @property
    def active_layer_parameters(self) -> int:
        """Of one layer, those that compute a given token."""
        idle = (self.experts - self.experts_per_token) * self._expert_parameters
        return self.layer_parameters - idle

    @property
    def output_parameters(self) -> int:
        """Of the output layer."""
        return self.vocabulary * self.hidden

    @property
    def active_parameters(self) -> int:
        """Those whose products compute a given token: without embeddings, which are looked up, and idle experts."""
        return self.layers * self.active_layer_parameters + self.output_parameters

    def touched_parameters(self, tokens: int) -> float:
        """Those that a step on so many tokens reads: of experts, the expected number with a token if all are alike."""
        idle = self.experts * (1 - self.experts_per_token / self.experts) ** tokens if self.experts else 0.0
        return self.layers * (self.layer_parameters - idle * self._expert_parameters) + self.output_parameters

    def kv_bytes(self, dtype: str = "bfloat16") -> int:
        """Bytes of the key-value cache per token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]

    def forward_flops(self, context: float) -> float:
        """Of one token that sees `context` tokens: 2 per parameter, and 4 per head feature and token seen."""
        return 2 * self.active_parameters + 4 * self.layers * self.heads * self.head_dim * context

    def _feed_forward(self) -> dict[str, tuple[int, ...]]:
        return {
            "mlp.gate_proj.weight": (self.intermediate, self.hidden),
            "mlp.up_proj.weight": (self.intermediate, self.hidden),
            "mlp.down_proj.weight": (self.hidden, self.intermediate),
        }

    def _experts(self) -> dict[str, tuple[int, ...]]:
        return {
            "mlp.experts.gate_up_proj": (self.experts, 2 * self.intermediate, self.hidden),
            "mlp.experts.down_proj": (self.experts, self.hidden, self.intermediate),
            "mlp.gate.weight": (self.experts, self.hidden),
        }

    @property
    def _expert_parameters(self) -> int:
        return 3 * self.hidden * self.intermediate


def shape_of_folder(folder: Path) -> ModelShape:
    """From a Hugging Face folder's config.json. Raises ModelFolderError if that is missing or says no sizes."""
    try:
        values = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"{folder}: its config.json can't be read ({error})") from error
    return shape_of_config(values, str(folder))


def shape_of_config(values: Mapping[str, Any], name: str) -> ModelShape:
    """From the content of a config.json. Norms and biases that are small beside the rest may be left out.

    Raises ModelFolderError if a size is missing.
    """
    # Models that also see have their sizes in a section.
    values = values.get("text_config") or values
    for key in _NEEDED:
        if not isinstance(values.get(key), int):
            raise ModelFolderError(
                f"{name}: its config.json has no {key}; expected the sizes of a causal language model"
            )
    heads, kind = values["num_attention_heads"], values.get("model_type", "")
    experts = values.get("num_experts") or values.get("num_local_experts") or 0
    return ModelShape(
        name=name,
        layers=values["num_hidden_layers"],
        hidden=values["hidden_size"],
        intermediate=(values.get("moe_intermediate_size") if experts else None) or values["intermediate_size"],
        heads=heads,
        kv_heads=values.get("num_key_value_heads") or heads,
        vocabulary=values["vocab_size"],
        head_dim=values.get("head_dim") or values["hidden_size"] // heads,
        tied=bool(values.get("tie_word_embeddings", kind.startswith("gemma"))),
        head_norms=kind in ("qwen3", "qwen3_moe", "gemma3_text"),
        qkv_bias=kind == "qwen2" or bool(values.get("attention_bias")),
        experts=experts,
        experts_per_token=values.get("num_experts_per_tok") or 0,
    )


def shape_of_bootstrap(bootstrap: BootstrapConfig, vocabulary: int = 64) -> ModelShape:
    """The tiny Llama that a run creates; its vocabulary is known only when the prompts are."""
    return ModelShape(
        name="bootstrap",
        layers=bootstrap.num_layers,
        hidden=bootstrap.hidden_size,
        intermediate=bootstrap.intermediate_size,
        heads=bootstrap.num_heads,
        kv_heads=bootstrap.num_heads,
        vocabulary=vocabulary,
        head_dim=bootstrap.hidden_size // bootstrap.num_heads,
        tied=True,
    )
