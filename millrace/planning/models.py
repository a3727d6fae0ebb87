"""Sizes of a model, from its config.json or by name: parameters, and bytes of a token in the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.recipe import choose_recipe
from configs.schema import RunConfig
from millrace.errors import InputError, ModelFolderError
from storage.json_text import parse_json

BYTES = {"float32": 4, "bfloat16": 2, "fp8": 1}
"""Bytes of a number by number format."""
_NEEDED = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads", "vocab_size")
_BOOTSTRAP_VOCABULARY = 64
"""The vocabulary of a start model is known only when the prompts are."""


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """A decoder like Llama's, dense or a mixture of experts. Norms and biases are too small to count."""

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
    experts: int = 0
    """Experts of each layer; 0: it is dense."""
    experts_per_token: int = 0

    def layer_matrices(self) -> dict[str, tuple[int, int]]:
        """(rows, columns) of each linear layer of one decoder layer, by its name there; one expert's of a mixture."""
        queries, keys = self.heads * self.head_dim, self.kv_heads * self.head_dim
        return {
            "q_proj": (queries, self.hidden),
            "k_proj": (keys, self.hidden),
            "v_proj": (keys, self.hidden),
            "o_proj": (self.hidden, queries),
            "gate_proj": (self.intermediate, self.hidden),
            "up_proj": (self.intermediate, self.hidden),
            "down_proj": (self.hidden, self.intermediate),
        }

    @property
    def parameters(self) -> int:
        """Number of parameters, tied ones once."""
        return self.layers * self.layer_parameters + self.other_parameters

    @property
    def layer_parameters(self) -> int:
        """Parameters of one layer, all experts included."""
        return self._layer_parameters(self.experts)

    @property
    def active_layer_parameters(self) -> int:
        """Parameters of one layer that compute a given token."""
        return self._layer_parameters(self.experts_per_token)

    def _layer_parameters(self, experts: int) -> int:
        attention = 2 * (self.heads + self.kv_heads) * self.head_dim * self.hidden
        return attention + max(1, experts) * 3 * self.hidden * self.intermediate

    @property
    def other_parameters(self) -> int:
        """Parameters outside of layers: embeddings, and the output layer if it is another tensor."""
        return (1 if self.tied else 2) * self.output_parameters

    @property
    def output_parameters(self) -> int:
        """Parameters of the output layer."""
        return self.vocabulary * self.hidden

    def kv_bytes(self, dtype: str) -> int:
        """Bytes of the key-value cache per token, in all layers."""
        return 2 * self.layers * self.kv_heads * self.head_dim * BYTES[dtype]


def shape_of_folder(folder: Path) -> ModelShape:
    """Reads a Hugging Face folder's config.json. Raises ModelFolderError if that is missing or says no sizes."""
    try:
        values = parse_json((folder / "config.json").read_bytes())
    except (OSError, ValueError) as error:
        raise ModelFolderError(f"its config.json can't be read ({error})", file=folder) from error
    return shape_of_config(values, str(folder))


def shape_of_config(values: Mapping[str, Any], name: str) -> ModelShape:
    """Reads the content of a config.json. Raises ModelFolderError if a size is missing."""
    # Models that also see have their sizes in a section.
    values = values.get("text_config") or values
    for key in _NEEDED:
        if not isinstance(values.get(key), int):
            raise ModelFolderError(
                f"its config.json has no {key}", file=name, expected="the sizes of a causal language model"
            )
    heads = values["num_attention_heads"]
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
        tied=bool(values.get("tie_word_embeddings", values.get("model_type", "").startswith("gemma"))),
        experts=experts,
        experts_per_token=values.get("num_experts_per_tok") or 0,
    )


def shape_of_model(config: RunConfig) -> ModelShape:
    """Reads the sizes of the config's model. Raises ModelFolderError if its folder does not say them."""
    if config.model.path is not None:
        return shape_of_folder(Path(config.model.path))
    recipe = choose_recipe(config)
    return ModelShape(
        name="bootstrap",
        layers=recipe.num_layers,
        hidden=recipe.hidden_size,
        intermediate=recipe.intermediate_size,
        heads=recipe.num_heads,
        kv_heads=recipe.num_heads,
        vocabulary=_BOOTSTRAP_VOCABULARY,
        head_dim=recipe.hidden_size // recipe.num_heads,
        tied=True,
    )


# Layers, hidden size, intermediate size, heads, key-value heads, vocabulary.
_KNOWN: dict[str, tuple[int, ...]] = {
    "llama-8b": (32, 4096, 14_336, 32, 8, 128_256),
    "llama-70b": (80, 8192, 28_672, 64, 8, 128_256),
    "llama-405b": (126, 16_384, 53_248, 128, 8, 128_256),
    "qwen2.5-1.5b": (28, 1536, 8960, 12, 2, 151_936),
    "qwen2.5-3b": (36, 2048, 11_008, 16, 2, 151_936),
    "qwen2.5-7b": (28, 3584, 18_944, 28, 4, 152_064),
    "qwen2.5-14b": (48, 5120, 13_824, 40, 8, 152_064),
    "qwen2.5-32b": (64, 5120, 27_648, 40, 8, 152_064),
    "qwen2.5-72b": (80, 8192, 29_568, 64, 8, 152_064),
    "qwen3-0.6b": (28, 1024, 3072, 16, 8, 151_936),
    "qwen3-1.7b": (28, 2048, 6144, 16, 8, 151_936),
    "qwen3-4b": (36, 2560, 9728, 32, 8, 151_936),
    "qwen3-8b": (36, 4096, 12_288, 32, 8, 151_936),
    "qwen3-14b": (40, 5120, 17_408, 40, 8, 151_936),
    "qwen3-32b": (64, 5120, 25_600, 64, 8, 151_936),
    "qwen3-30b-a3b": (48, 2048, 768, 32, 4, 151_936),
    "qwen3-235b-a22b": (94, 4096, 1536, 64, 4, 151_936),
}
_TIED = ("qwen2.5-1.5b", "qwen2.5-3b", "qwen3-0.6b", "qwen3-1.7b", "qwen3-4b")
_MIXTURES = ("qwen3-30b-a3b", "qwen3-235b-a22b")


def model_named(name: str) -> ModelShape:
    """Returns the sizes of a published model: Llama 3.1, Qwen 2.5 or Qwen 3. Raises InputError for another name."""
    if name not in _KNOWN:
        raise InputError(
            f'the sizes of "{name}" are not known', expected=f"a model's folder or one of {', '.join(_KNOWN)}"
        )
    layers, hidden, intermediate, heads, kv_heads, vocabulary = _KNOWN[name]
    experts, experts_per_token = (128, 8) if name in _MIXTURES else (0, 0)
    return ModelShape(
        name=name,
        layers=layers,
        hidden=hidden,
        intermediate=intermediate,
        heads=heads,
        kv_heads=kv_heads,
        vocabulary=vocabulary,
        tied=name in _TIED,
        experts=experts,
        experts_per_token=experts_per_token,
    )
