"""Which kinds of models the trainer can train, by their config.json."""

from collections.abc import Mapping
from typing import Any

from millrace.errors import InputError

KNOWN = ("llama", "mistral", "qwen2", "qwen3")
"""Values of `model_type` whose logits are the output layer's, without further steps."""


def check_trainable(model: Mapping[str, Any]) -> None:
    """Raises InputError for another kind of model, and for layers that do not attend to all earlier tokens.

    `model` is the content of config.json, or the config that transformers makes of it, which has more about its layers.
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
