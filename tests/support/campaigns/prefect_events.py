"""The events of a run, read from the Prefect server."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

from support.campaigns.prefect_server import prefect_client


@dataclass(frozen=True, kw_only=True)
class SeenEvent:
    """One event of a run."""

    kind: str
    """Without the leading `millrace.`."""
    t: float
    """Unix seconds."""
    payload: dict[str, Any]
    related: set[str]
    """Roles of the resources that Prefect added, such as `flow-run`."""


def events_of(prefect_api: str, run_id: str) -> list[SeenEvent]:
    """All events of the run so far, in order. An event takes a few seconds to arrive."""
    events_filter = {
        "event": {"prefix": ["millrace."]},
        "resource": {"id": [f"millrace.run.{run_id}"]},
        "order": "ASC",
    }
    with prefect_client(prefect_api) as client:
        answer = client.post("/events/filter", json={"filter": events_filter, "limit": 50})
    return [
        SeenEvent(
            kind=event["event"].removeprefix("millrace."),
            t=datetime.fromisoformat(event["occurred"]).timestamp(),
            payload=event["payload"],
            related={related["prefect.resource.role"] for related in event["related"]},
        )
        for event in answer.json()["events"]
    ]
