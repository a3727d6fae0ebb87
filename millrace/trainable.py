"""Which kinds of models the trainer can train; known from a model's config.json, before any process starts."""

from collections.abc import Mapping
from typing import Any

from millrace.errors import InputError

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Kinds of models, by their config's `model_type`, whose logits are the output layer's and nothing is done to after."""


def check_trainable(model: Mapping[str, Any]) -> None:
    """Raises InputError for another kind of model, and for one that doesn't attend to all that came before.

    `model` is the content of its config.json, or what transformers makes of it, which says more of its layers.
    """
    kind = model["model_type"]
    if kind not in KNOWN:
        raise InputError(f"the trainer can't train a {kind} model; expected one of {', '.join(KNOWN)}")
    layers = set(model.get("layer_types") or ["full_attention"])
    window = model.get("sliding_window") if kind == "mistral" else None
    if window is not None or layers != {"full_attention"}:
        raise InputError(
            f"the trainer can't train a {kind} model with sliding windows; "
            "expected one whose every layer attends to all tokens before"
        )
