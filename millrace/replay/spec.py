"""The request of a replay, kept in the replay's own run: written before anything starts, read by its stages."""

import json
from typing import Any

from configs.replay import ReplayRequest
from millrace.runs.record import latest_attempt, read_run
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
    return ReplayRequest.model_validate(_from_older(store, values) if "selection" in values else values)


def _from_older(store: Store, values: dict[str, Any]) -> dict[str, Any]:
    """Replays used to keep a selection of their own, shares of their sources, and only whether they scored anew."""
    values = values | values.pop("selection")
    values.pop("own_copies", None)
    values["sources"] = [source["url"] for source in values["sources"]]
    values["rescore"] = latest_attempt(store).config["scoring"]["reward"] if values["rescore"] else None
    return values | {"run_id": read_run(store)["run_id"]}
