"""A stored config as text by dotted key, to show, filter and compare."""

import json
from collections.abc import Mapping


def settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """The config as text, by dotted key. Strings stand as they are, anything else as JSON."""
    texts: dict[str, str] = {}
    for name, value in config.items():
        if isinstance(value, Mapping) and value:
            texts |= settings(value, f"{prefix}{name}.")
        else:
            texts[prefix + name] = _text(value)
    return texts


def _text(value: object) -> str:
    if isinstance(value, str):
        return value
    # Not 3.0000000000000004e-05; but what differs in the tenth digit still differs.
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
