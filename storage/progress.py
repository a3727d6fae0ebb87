"""Status records: one small JSON object per stage replica, overwritten, for people and supervisors.

Nothing is decided from them: what happened is in the streams.
"""

import json
from pathlib import PurePosixPath
from typing import Any

from storage import layout
from storage.errors import NotInStore
from storage.json_text import parse_json
from storage.stores.base import Store


def write_progress(store: Store, stage: str, replica: int, values: dict[str, Any]) -> None:
    """Replace a replica's status record with `values`, a JSON object."""
    store.put(layout.progress(stage, replica), json.dumps(values, sort_keys=True).encode())


def read_status(store: Store, stage: str, replica: int) -> dict[str, Any]:
    """A replica's status record; empty if there is none, or if a power cut tore it."""
    return _read(store, layout.progress(stage, replica))


def read_progress(store: Store) -> dict[str, dict[str, Any]]:
    """Every replica's status record as `{"<stage>-<replica>": values}`, without torn ones."""
    records = {PurePosixPath(path).stem: _read(store, path) for path in store.list(layout.PROGRESS)}
    return {name: record for name, record in records.items() if record}


def _read(store: Store, path: str) -> dict[str, Any]:
    try:
        values = parse_json(bytes(store.get(path)))
    except (NotInStore, ValueError):
        return {}
    return values if isinstance(values, dict) else {}
