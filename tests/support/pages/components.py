"""Dash's components as the browser gets them, and their content."""

import json
from collections.abc import Iterator
from typing import Any

from dash._utils import to_json
from dash.development.base_component import Component


def plain(components: Any) -> Any:
    """The components as the browser's JSON."""
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


def components(root: Any) -> Iterator[Component]:
    """Every component of a tree, before it becomes JSON."""
    if isinstance(root, Component):
        yield root
        yield from components(getattr(root, "children", None))
    elif isinstance(root, (list, tuple)):
        for child in root:
            yield from components(child)


def words(root: Any) -> str:
    """Every text in a tree of components, in order."""
    children = [getattr(component, "children", None) for component in components(root)]
    flat = [text for child in children for text in (child if isinstance(child, list) else [child])]
    return " ".join(text for text in flat if isinstance(text, str))


def of_class(root: Any, name: str) -> list[Component]:
    return [each for each in components(root) if name in str(getattr(each, "className", "")).split()]
