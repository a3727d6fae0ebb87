"""The results of a run's evaluations: `evaluations/<policy version>.json`, one file per evaluated version.

A result is plain JSON. It always has `policy_version`, `accuracy`, `prompts` and `t`, the first two of the held-out
prompts; the measures of further sets are below `sets`. An accuracy is None if the reward failed for every answer.
docs/data.md lists all keys. A file that can't be read counts as absent: the version is evaluated again, and
`millrace fsck` names the file.
"""

import json
from collections.abc import Sequence
from contextlib import suppress
from typing import Any

from storage import layout
from storage.errors import NotInStore, StreamCorrupt
from storage.json_text import parse_json
from storage.progress import FolderReader
from storage.stores.base import Store

Result = dict[str, Any]
HELD_OUT = "held_out"
"""Name of the set that promotion, early stop and the best version go by."""


def write_result(store: Store, result: Result) -> None:
    """Stores the result of one version, durably. An earlier result of the same version is replaced."""
    path = layout.evaluation(result["policy_version"])
    # Only creation is durable. After a crash in between the version has no result, so it is evaluated again.
    store.delete(path)
    store.put_if_absent(path, json.dumps(result).encode())


def read_result(store: Store, policy_version: int) -> Result | None:
    """The result of one version; None if it was not evaluated or its file can't be read."""
    path = layout.evaluation(policy_version)
    with suppress(NotInStore, StreamCorrupt):
        return parse_result(bytes(store.get(path)), path)
    return None


class ResultsReader(FolderReader[Result]):
    """Reads every result of a run repeatedly, by ascending policy version."""

    def __init__(self, store: Store) -> None:
        super().__init__(store, layout.EVALUATIONS, parse_result)


def parse_result(data: bytes, path: str) -> Result:
    """The result in the file at `path`. Raises StreamCorrupt."""
    try:
        result: Result = parse_json(data)
        result |= {"policy_version": int(result["policy_version"]), "t": float(result["t"])}
        for measures in measures_by_set(result).values():
            accuracy = measures["accuracy"]
            measures["accuracy"] = None if accuracy is None else float(accuracy)
            measures["prompts"] = int(measures["prompts"])
        return result
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise StreamCorrupt(path, f"expected the result of an evaluation: {error!r}") from error


def measures_by_set(result: Result) -> dict[str, Result]:
    """The measures of each set by its name, the held-out prompts first."""
    return {HELD_OUT: result, **result.get("sets", {})}


def comparable(results: Sequence[Result]) -> list[Result]:
    """Scored results with as many held-out prompts as the newest version's; accuracies on others can't be compared."""
    scored = [result for result in results if result["accuracy"] is not None]
    return [result for result in scored if result["prompts"] == scored[-1]["prompts"]]


def best_result(results: Sequence[Result]) -> Result | None:
    """The result of the best version, the base model included; None without any. `results` are in order of versions.

    It has the highest accuracy on the held-out prompts, and is the earliest of equals.
    """
    return max(comparable(results), key=lambda result: result["accuracy"], default=None)
