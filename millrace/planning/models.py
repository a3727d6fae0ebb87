"""Sizes of a model, from its config.json or by name: parameters, and bytes of a token in the cache."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from configs.recipe import choose_recipe
from configs.schema import RunConfig
from millrace.errors import InputError, ModelFolderError
from millrace.models.weight_files import read_object

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
    head_norms: bool = False
    """Whether the heads' queries and keys are normalised."""

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
    return shape_of_config(read_object(folder / "config.json"), str(folder))


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
        head_norms=values.get("model_type", "").startswith(("qwen3", "gemma3")),
    )


def shape_of_model(config: RunConfig) -> ModelShape:
    """Reads the sizes of the config's model. Raises ModelFolderError if its folder does not say them."""
    if config.model.path is not None:
        return shape_of_folder(Path(config.model.path))
    recipe = choose_recipe(config)
    sizes = {
        "num_hidden_layers": recipe.num_layers,
        "hidden_size": recipe.hidden_size,
        "intermediate_size": recipe.intermediate_size,
        "num_attention_heads": recipe.num_heads,
        "vocab_size": _BOOTSTRAP_VOCABULARY,
        "tie_word_embeddings": True,
    }
    return shape_of_config(sizes, "bootstrap")


def model_named(name: str) -> ModelShape:
    """Returns the sizes of a published model. Raises InputError for a name that is not in `models.json`."""
    return shape_of_config(published_config(name), name)


def published_config(name: str) -> dict[str, Any]:
    """Returns the sizes of a published model as its config.json has them. Raises InputError for another name."""
    models = read_object(Path(__file__).parent / "models.json")
    if name not in models:
        expected = f"a model's folder or one of {', '.join(models)}"
        raise InputError(f'the sizes of "{name}" are not known', expected=expected)
    values: dict[str, Any] = models[name]
    return values
