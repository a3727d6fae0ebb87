"""Which families of models the trainer can train, by their config.json. The list in docs/models.md is made from it."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from millrace.errors import InputError


@dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """Models that differ in sizes only."""

    model_type: str
    """Their `model_type` in config.json."""
    name: str
    """Their common names."""
    experts: bool = False
    """Whether their layers are mixtures of experts."""
    tensor_parallel: bool = True
    """Whether tensor ranks can divide their layers."""


_FAMILIES = (
    Family(model_type="llama", name="Llama 2 and 3, SmolLM 1 and 2"),
    Family(model_type="mistral", name="Mistral"),
    Family(model_type="qwen2", name="Qwen 2 and 2.5"),
    Family(model_type="qwen3", name="Qwen 3"),
    Family(model_type="gemma2", name="Gemma 2"),
    Family(model_type="gemma3_text", name="Gemma 3, text only"),
    # Their layers compute query, key and value, and gate and up, in one product each.
    Family(model_type="phi3", name="Phi 3 and 4", tensor_parallel=False),
    # Their head norms are over all heads together.
    Family(model_type="olmo2", name="OLMo 2", tensor_parallel=False),
    Family(model_type="olmo3", name="OLMo 3", tensor_parallel=False),
    Family(model_type="smollm3", name="SmolLM 3"),
    Family(model_type="granite", name="Granite 3"),
    Family(model_type="mixtral", name="Mixtral", experts=True, tensor_parallel=False),
    Family(model_type="qwen3_moe", name="Qwen 3, mixtures", experts=True, tensor_parallel=False),
    Family(model_type="gpt_oss", name="gpt-oss", experts=True, tensor_parallel=False),
    Family(model_type="olmoe", name="OLMoE", experts=True, tensor_parallel=False),
)
FAMILIES = {family.model_type: family for family in _FAMILIES}
"""By `model_type`."""
_BY_LENGTH = ("dynamic", "longrope")
"""Kinds of rotary embeddings whose frequencies depend on the longest sequence of a forward pass."""


def check_trainable(model: Mapping[str, Any]) -> None:
    """Raises InputError for a model of another family, or one whose log π would be wrong in a packed batch.

    `model` is the content of config.json, or the config that transformers makes of it.
    """
    kind, rope = model["model_type"], _rope_by_length(model)
    if kind not in FAMILIES:
        problem, expected = "", f"one of {', '.join(FAMILIES)}"
    elif rope is not None:
        problem = f" with rotary embeddings of type {rope}, which depend on the longest sequence of a batch"
        expected = "those of a fixed type"
    elif model.get("quantization_config"):
        problem, expected = " with quantized weights", "a folder without quantization_config, in float32 or bfloat16"
    elif model.get("use_bidirectional_attention"):
        problem, expected = " with use_bidirectional_attention", "tokens that attend to earlier ones only"
    else:
        return
    raise InputError(f"a {kind} model{problem} can't be trained", expected=f"{expected} (docs/models.md)")


def _rope_by_length(model: Mapping[str, Any]) -> str | None:
    """The type of rotary embeddings if it is one of those that depend on lengths."""
    # Under its old name in older folders, and per kind of layer in models that have several.
    both = [model.get(name) or {} for name in ("rope_parameters", "rope_scaling")]
    for rope in (*both, *(below for every in both for below in every.values() if isinstance(below, Mapping))):
        if (kind := rope.get("rope_type", rope.get("type"))) in _BY_LENGTH:
            return str(kind)
    return None
