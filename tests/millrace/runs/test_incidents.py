"""Incidents are stored in the run, as sentences."""

from functools import partial

import pytest

from millrace.runs.incidents import Incident, record_incident, summarize_incidents
from millrace.runs.record import create_run
from storage import layout
from storage.json_text import parse_as
from storage.progress import FolderReader
from storage.stores.base import Store
from storage.stores.memory import MemoryStore


def read_incidents(store: Store) -> list[Incident]:
    return FolderReader(store, layout.INCIDENTS, partial(parse_as, Incident)).read()


@pytest.fixture
def run(memory_store: MemoryStore) -> Store:
    create_run(memory_store, "run", {})
    return memory_store


def test_restarts_and_alarms_are_read_and_counted(run: Store) -> None:
    assert summarize_incidents(read_incidents(run)) == {"counts": {}, "restarts": {}, "latest": []}
    record_incident(run, "stage.restarted", {"stage": "train-0", "cause": "train-0 exited with code 3", "restarts": 1})
    record_incident(run, "training.collapsed", {"sentence": "version 27: the reward is gone", "good_version": 20})
    record_incident(run, "pipeline.stalled", {"seconds": 120.4, "doing": {}})
    record_incident(run, "stage.killed", {"stage": "score-0", "sentence": "score-0 was asked to stop, and killed"})
    incidents = read_incidents(run)
    assert {incident.sentence for incident in incidents} == {
        "train-0 was started again: train-0 exited with code 3",
        "training collapsed: version 27: the reward is gone",
        "nothing has moved for 120 s",
        "score-0 was asked to stop, and killed",
    }
    summary = summarize_incidents(incidents)
    kinds = ("pipeline.stalled", "stage.killed", "stage.restarted", "training.collapsed")
    assert summary["counts"] == dict.fromkeys(kinds, 1)
    assert summary["restarts"] == {"train-0": 1}


def test_events_of_a_healthy_run_are_no_incidents(run: Store) -> None:
    record_incident(run, "version.published", {"policy_version": 3, "push_seconds": 0.1})
    record_incident(run, "checkpoint.promoted", {"policy_version": 3, "accuracy": 0.5, "sentence": "better"})
    assert run.list(layout.INCIDENTS) == []


def test_an_alarm_at_every_step_fills_no_store(run: Store) -> None:
    for version in range(120):
        record_incident(run, "probe.alarm", {"sentence": f"version {version}"})
    record_incident(run, "generator.lost", {"generator": 0, "sentence": "generator 0 is late"})
    assert summarize_incidents(read_incidents(run))["counts"] == {"generator.lost": 1, "probe.alarm": 100}


def test_nothing_is_written_where_there_is_no_run(memory_store: MemoryStore) -> None:
    record_incident(memory_store, "generator.lost", {"sentence": "generator 0 is late"})
    assert memory_store.list() == []


@pytest.mark.parametrize("damage", [b"", b"{", b"[1]", b'{"t": 1}', b"\xff"])
def test_a_torn_incident_is_left_out(run: Store, damage: bytes) -> None:
    run.put(f"{layout.INCIDENTS}/1-torn.json", damage)
    record_incident(run, "generator.lost", {"sentence": "generator 0 is late"})
    assert [incident.sentence for incident in read_incidents(run)] == ["generator 0 is late"]
