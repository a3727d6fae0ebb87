"""Status records: one small JSON object per stage replica, overwritten, for people and supervisors.

Nothing is decided from them: what happened is in the streams. They are sealed, so that whatever else is in their place
counts as no record.
"""

import json
from collections.abc import Callable
from pathlib import PurePosixPath
from typing import Any, Generic, TypeVar

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store
from storage.streams.sealed import seal, unseal

_T = TypeVar("_T")


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


class FolderReader(Generic[_T]):
    """Reads a folder of small files repeatedly; each `read` gets only those from the store that are new or changed.

    `parse` makes a value of a file's content and path, and raises StreamCorrupt for a damaged file.
    """

    def __init__(self, store: Store, folder: str, parse: Callable[[bytes, str], _T]) -> None:
        self._store = store
        self._folder = folder
        self._parse = parse
        self._files: dict[str, tuple[float, _T | StreamCorrupt]] = {}

    def read(self) -> list[_T]:
        """The values of all readable files, in order of paths."""
        files = {}
        for entry in self._store.entries(self._folder):
            if (cached := self._files.get(entry.path)) is not None and cached[0] == entry.t_modified:
                files[entry.path] = cached
                continue
            try:
                files[entry.path] = entry.t_modified, self._parse(bytes(self._store.get(entry.path)), entry.path)
            except StreamCorrupt as error:
                files[entry.path] = entry.t_modified, error
            except NotInStore:
                # It is being replaced.
                continue
        self._files = files
        return [value for _, (_, value) in sorted(files.items()) if not isinstance(value, StreamCorrupt)]

    @property
    def damaged(self) -> list[StreamCorrupt]:
        """One error per file that could not be parsed when `read` was last called."""
        return [value for _, value in self._files.values() if isinstance(value, StreamCorrupt)]
