"""What went wrong in a run is kept in the run, in sentences."""

import pytest

from millrace.runs.incidents import IncidentsReader, in_short, record_incident
from millrace.runs.record import create_run
from storage import layout
from storage.stores.base import Store
from storage.stores.memory import MemoryStore


@pytest.fixture
def run(memory_store: MemoryStore) -> Store:
    create_run(memory_store, "run", {})
    return memory_store


def test_restarts_and_alarms_are_told_in_order_and_counted(run: Store) -> None:
    reader = IncidentsReader(run)
    assert in_short(reader.read()) == {"counts": {}, "restarts": {}, "latest": []}
    record_incident(run, "stage.restarted", {"stage": "train-0", "cause": "train-0 exited with code 3", "restarts": 1})
    record_incident(run, "training.collapsed", {"sentence": "version 27: the reward is gone", "good_version": 20})
    record_incident(run, "pipeline.stalled", {"seconds": 120.4, "doing": {}})
    record_incident(run, "stage.killed", {"stage": "score-0", "sentence": "score-0 was asked to stop, and killed"})
    found = reader.read()
    assert {one.sentence for one in found} == {
        "train-0 was started again: train-0 exited with code 3",
        "training collapsed: version 27: the reward is gone",
        "nothing has moved for 120 s",
        "score-0 was asked to stop, and killed",
    }
    assert [one.t for one in found] == sorted(one.t for one in found)
    short = in_short(found)
    assert short["counts"] == {"pipeline.stalled": 1, "stage.killed": 1, "stage.restarted": 1, "training.collapsed": 1}
    assert short["restarts"] == {"train-0": 1}


def test_events_of_a_healthy_run_are_no_incidents(run: Store) -> None:
    record_incident(run, "version.published", {"policy_version": 3, "push_seconds": 0.1})
    record_incident(run, "checkpoint.promoted", {"policy_version": 3, "accuracy": 0.5, "sentence": "better"})
    assert run.list(layout.INCIDENTS) == []


def test_an_alarm_at_every_step_fills_no_store(run: Store) -> None:
    for version in range(120):
        record_incident(run, "probe.alarm", {"sentence": f"version {version}"})
    record_incident(run, "generator.lost", {"generator": 0, "sentence": "generator 0 is late"})
    assert in_short(IncidentsReader(run).read())["counts"] == {"generator.lost": 1, "probe.alarm": 100}


def test_where_there_is_no_run_nothing_is_written(memory_store: MemoryStore) -> None:
    record_incident(memory_store, "generator.lost", {"sentence": "generator 0 is late"})
    assert memory_store.list() == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"t": 1}', b"\xff"])
def test_a_torn_one_is_left_out(run: Store, damage: bytes) -> None:
    run.put(f"{layout.INCIDENTS}/1-torn.json", damage)
    record_incident(run, "generator.lost", {"sentence": "generator 0 is late"})
    assert [one.sentence for one in IncidentsReader(run).read()] == ["generator 0 is late"]
