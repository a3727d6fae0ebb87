"""What a replay found, put together from its own run and the stored one, and kept in its run's folder `replay/`.

    verify  ─► verdict.json          rescore ─► rescored.json, changed.parquet
    compare ─► comparison.parquet    train   ─► trained.json: beside the stored run

The stages of verify and compare leave theirs there themselves; the other two are made here, once their stages are done.
"""

import json
from dataclasses import asdict
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from millrace.replay.rescored import compare_scores
from millrace.replay.spec import read_spec
from millrace.replay.stored import StoredRun
from millrace.replay.trained import trained
from millrace.run import latest_attempt
from storage import layout
from storage.errors import NotInStore
from storage.factory import open_store
from storage.store import Store

NAMES = ("verdict", "rescored", "trained", "comparison")
"""What a replay may find, each as JSON."""


def put_together(store: Store) -> dict[str, Any]:
    """Makes what is made here, for the replay in `store`, and returns all that it found, by name."""
    spec = read_spec(store)
    assert spec is not None
    sources = [open_store(source.url) for source in spec.sources]
    if spec.rescore:
        scoring = latest_attempt(store).config["scoring"]
        rescored = compare_scores(StoredRun(sources[0]), store, scoring["reward"], scoring["replicas"])
        _put(store, "rescored", rescored.to_json())
        sink = pa.BufferOutputStream()
        pq.write_table(rescored.changed, sink)
        store.put(f"{layout.REPLAY_RESULTS}/changed.parquet", memoryview(sink.getvalue()))
    if spec.job == "train":
        runs = [asdict(trained(source)) for source in (*sources, store)]
        _put(store, "trained", {"runs": runs})
    return results(store)


def results(store: Store) -> dict[str, Any]:
    """What the replay in `store` found, as far as it has come."""
    return {name: found for name in NAMES if (found := _get(store, name)) is not None}


def _put(store: Store, name: str, values: dict[str, Any]) -> None:
    store.put(_path(name), json.dumps(values, indent=1).encode())


def _get(store: Store, name: str) -> dict[str, Any] | None:
    try:
        found: dict[str, Any] = json.loads(bytes(store.get(_path(name))))
    except NotInStore:
        return None
    return found


def _path(name: str) -> str:
    return f"{layout.REPLAY_RESULTS}/{name}.json"
