"""What the own run of a replay holds besides a trainer's: its request, and its results in the folder `replay/`.

replay.json ─► read by its stages
verify  ─► verdict.json                           rescore ─► rescored.json, changed.parquet
compare ─► comparison.json, comparison.parquet    train   ─► trained.json
"""

import json
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from configs.requests import ReplayRequest
from storage import layout
from storage.errors import NotInStore
from storage.stores.base import Store


def write_spec(store: Store, spec: ReplayRequest) -> None:
    """Once, when the replay's run is created."""
    store.put_if_absent(layout.REPLAY, spec.model_dump_json(indent=1).encode())


def read_spec(store: Store) -> ReplayRequest | None:
    """None if the run is not a replay."""
    try:
        values = json.loads(bytes(store.get(layout.REPLAY)))
    except NotInStore:
        return None
    return ReplayRequest.model_validate(values)


_NAMES = ("verdict", "rescored", "trained", "comparison")


def write_result(store: Store, name: str, values: dict[str, Any], table: tuple[str, pa.Table] | None = None) -> None:
    """Writes `values` as `<name>.json`, and a named table as Parquet."""
    if table is not None:
        sink = pa.BufferOutputStream()
        pq.write_table(table[1], sink)
        store.put(f"{layout.REPLAY_RESULTS}/{table[0]}.parquet", memoryview(sink.getvalue()))
    store.put(f"{layout.REPLAY_RESULTS}/{name}.json", json.dumps(values, indent=1).encode())


def read_results(store: Store) -> dict[str, Any]:
    """The JSON results that exist, by name."""
    found = {}
    for name in _NAMES:
        try:
            found[name] = json.loads(bytes(store.get(f"{layout.REPLAY_RESULTS}/{name}.json")))
        except NotInStore:
            continue
    return found


def read_table(store: Store, name: str) -> pa.Table:
    """The table `<name>.parquet`."""
    return pq.read_table(pa.BufferReader(pa.py_buffer(store.get(f"{layout.REPLAY_RESULTS}/{name}.parquet"))))
