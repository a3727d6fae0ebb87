"""A stored config as text by dotted key, to show, filter and compare."""

import json
from collections.abc import Mapping


def settings(config: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Returns dotted key → value; strings are unchanged, other values are JSON."""
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
    # Avoids 3.0000000000000004e-05, but keeps differences in the tenth digit.
    return f"{value:.10g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
