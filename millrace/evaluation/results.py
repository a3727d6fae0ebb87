"""The held-out results of a run: `evaluations/<policy version>.json`, one file per evaluated version.

A result is plain JSON. It always has `policy_version`, `accuracy`, `prompts` and `t`; `millrace.stages.evaluate` adds
the rest.
"""

import json
from typing import Any

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.stores.base import Store

Result = dict[str, Any]
_REQUIRED = {"policy_version": int, "accuracy": float, "prompts": int, "t": float}


def write_result(store: Store, result: Result) -> None:
    """Store the result of one version. An earlier result of the same version is replaced."""
    store.put(layout.evaluation(result["policy_version"]), json.dumps(result).encode())


def read_result(store: Store, policy_version: int) -> Result | None:
    """The result of one version; None if it was not evaluated. Raises StreamCorrupt."""
    return _read(store, layout.evaluation(policy_version))


class ResultsReader:
    """Reads every result of a run, again and again; each time only the files that are new or have changed."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._results: dict[str, tuple[float, Result]] = {}
        self.damaged: list[StreamCorrupt] = []
        """One error per file that was no result when `read` was last called."""

    def read(self) -> list[Result]:
        """All readable results, by ascending policy version. Damaged files are left out and named in `damaged`."""
        self.damaged = []
        for entry in self._store.entries(layout.EVALUATIONS):
            t_modified, _ = self._results.get(entry.path, (None, None))
            if t_modified == entry.t_modified:
                continue
            try:
                result = _read(self._store, entry.path)
            except StreamCorrupt as error:
                self.damaged.append(error)
                continue
            if result is not None:
                self._results[entry.path] = entry.t_modified, result
        return sorted((result for _, result in self._results.values()), key=lambda result: result["policy_version"])


def _read(store: Store, path: str) -> Result | None:
    try:
        result: Result = json.loads(bytes(store.get(path)))
        return {**result, **{name: kind(result[name]) for name, kind in _REQUIRED.items()}}
    except NotInStore:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise StreamCorrupt(path, f"expected the result of an evaluation: {error!r}") from error
