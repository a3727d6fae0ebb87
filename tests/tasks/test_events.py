"""Events on their way to Prefect, as its client receives them."""

from collections.abc import Iterator

import pytest
from prefect.events.clients import AssertingEventsClient
from prefect.events.worker import EventsWorker
from prefect.settings import PREFECT_API_URL, temporary_settings

from tasks.events import emit

NOWHERE = "http://127.0.0.1:9/api"


@pytest.fixture
def sent() -> Iterator[list[AssertingEventsClient]]:
    """Prefect's clients, each with the events that it received."""
    AssertingEventsClient.reset()
    EventsWorker.set_client_override(AssertingEventsClient)
    yield AssertingEventsClient.all
    EventsWorker.set_client_override(None)
    AssertingEventsClient.reset()


def test_an_event_names_its_run_and_has_its_payload(sent: list[AssertingEventsClient]) -> None:
    with temporary_settings({PREFECT_API_URL: NOWHERE}):
        emit("stage.hung", "s3://bucket/runs/night-7", {"stage": "train-0", "seconds": 45.1})
        EventsWorker.instance().drain()
    (event,) = (event for client in sent for event in client.events)
    assert event.event == "millrace.stage.hung"
    assert event.resource.id == "millrace.run.night-7"
    assert event.payload == {"run_url": "s3://bucket/runs/night-7", "stage": "train-0", "seconds": 45.1}


def test_an_event_that_is_too_large_is_dropped(sent: list[AssertingEventsClient]) -> None:
    with temporary_settings({PREFECT_API_URL: NOWHERE}):
        emit("stage.hung", "/runs/a", {"doing": "x" * 10_000_000})
        emit("stage.hung", "/runs/b", {"doing": "train"})
        EventsWorker.instance().drain()
    assert [event.resource.id for client in sent for event in client.events] == ["millrace.run.b"]


def test_without_a_server_events_are_dropped(sent: list[AssertingEventsClient]) -> None:
    with temporary_settings(restore_defaults={PREFECT_API_URL}):
        emit("stage.hung", "/runs/a", {"doing": "train"})
    assert sent == []
