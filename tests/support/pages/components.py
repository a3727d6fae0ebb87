"""Dash's components as the browser gets them, and what is in them."""

import json
from collections.abc import Iterator
from typing import Any

from dash._utils import to_json


def plain(components: Any) -> Any:
    """As the browser gets it."""
    return json.loads(to_json(components))


def within(tree: Any) -> Iterator[dict[str, Any]]:
    """Every component of a page."""
    if isinstance(tree, list):
        for part in tree:
            yield from within(part)
    elif isinstance(tree, dict) and "props" in tree:
        yield tree
        yield from within(tree["props"].get("children"))


def texts(tree: Any) -> str:
    """All that a person reads on a page, but for its figures."""
    if isinstance(tree, list):
        return " ".join(texts(part) for part in tree if part != " ")
    if isinstance(tree, dict):
        return texts(tree["props"].get("children", ""))
    return "" if tree is None else str(tree)
