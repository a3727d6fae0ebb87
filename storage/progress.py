"""Signs of life: one small JSON object per stage replica, overwritten, for people and supervisors to look at.

Nothing is decided from them: what happened is in the streams.
"""

import json
from pathlib import PurePosixPath
from typing import Any

from storage import layout
from storage.errors import NotInStore
from storage.store import Store


def write_progress(store: Store, stage: str, replica: int, values: dict[str, Any]) -> None:
    """Replace the sign of life of one stage replica by `values`, a JSON object."""
    store.put(layout.progress(stage, replica), json.dumps(values, sort_keys=True).encode())


def read_life(store: Store, stage: str, replica: int) -> dict[str, Any]:
    """The sign of life of one stage replica; empty if it left none, or if a power cut tore it."""
    return _read(store, layout.progress(stage, replica))


def read_progress(store: Store) -> dict[str, dict[str, Any]]:
    """`{"<stage>-<replica>": values}` of every replica that left one; one torn by a power cut counts as absent."""
    lives = {PurePosixPath(path).stem: _read(store, path) for path in store.list(layout.PROGRESS)}
    return {name: life for name, life in lives.items() if life}


def _read(store: Store, path: str) -> dict[str, Any]:
    try:
        values = json.loads(bytes(store.get(path)))
    except (NotInStore, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
