"""Status records: one small JSON object per stage replica, overwritten, for people and supervisors.

Nothing is decided from them: what happened is in the streams. They are sealed, so that whatever else is in their place
counts as no record.
"""

import json
from pathlib import PurePosixPath
from typing import Any

from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal


def write_progress(store: Store, stage: str, replica: int, values: dict[str, Any]) -> None:
    """Replaces a replica's status record with `values`, a JSON object. Numbers that are not finite become null."""
    plain = json.loads(json.dumps(values), parse_constant=lambda name: None)
    store.put(layout.progress(stage, replica), seal(plain))


def read_status(store: Store, stage: str, replica: int) -> dict[str, Any]:
    """A replica's status record; empty if there is none, or if it was torn, damaged or replaced."""
    return _read(store, layout.progress(stage, replica))


def read_progress(store: Store) -> dict[str, dict[str, Any]]:
    """Every replica's status record as `{"<stage>-<replica>": values}`, without torn or damaged ones."""
    records = {PurePosixPath(path).stem: _read(store, path) for path in store.list(layout.PROGRESS)}
    return {name: record for name, record in records.items() if record}


def _read(store: Store, path: str) -> dict[str, Any]:
    try:
        return unseal(bytes(store.get(path)))
    except (NotInStore, ValueError):
        return {}
