"""The stored request of a replay: what was asked is what its stages read, also from replays of earlier versions."""

import json

from configs.replay import ReplayRequest
from millrace.replay.spec import read_spec, write_spec
from millrace.runs.record import create_run
from storage import layout
from storage.stores.memory import MemoryStore


def test_a_run_that_is_no_replay_has_no_request(memory_store: MemoryStore) -> None:
    assert read_spec(memory_store) is None


def test_what_was_asked_is_what_is_read(memory_store: MemoryStore) -> None:
    request = ReplayRequest(
        sources=["runs/a", "runs/b"], run_id="mine", job="train", where="reward_mean > 0", order="shuffled", to_step=9
    )
    write_spec(memory_store, request)
    assert read_spec(memory_store) == request


def test_the_request_of_an_earlier_replay_is_still_read(memory_store: MemoryStore) -> None:
    create_run(memory_store, "old", {"scoring": {"reward": "exact_match"}})
    selection = {"from_step": 2, "to_step": None, "where": None, "dropped": True, "max_staleness": 3}
    spec = {
        "sources": [{"url": "/runs/a", "share": 1.0}],
        "job": "train",
        "rescore": True,
        "selection": selection,
        "order": "stored",
        "start_step": 7,
        "tolerance": None,
        "losses": [],
        "own_copies": False,
    }
    memory_store.put(layout.REPLAY, json.dumps(spec).encode())
    assert read_spec(memory_store) == ReplayRequest(
        sources=["/runs/a"],
        run_id="old",
        job="train",
        rescore="exact_match",
        from_step=2,
        dropped=True,
        max_staleness=3,
        start_step=7,
    )
