"""The API of a Prefect server, used as Prefect's own clients use it: a request is repeated if the server is busy."""

from dataclasses import dataclass
from datetime import datetime
from typing import Any

import httpx
from prefect.client.base import PrefectHttpxSyncClient


def prefect_client(api: str, auth: tuple[str, str] | None = None) -> PrefectHttpxSyncClient:
    """A client of the server whose API is at `api`; `auth`: user and password.

    The server answers 503 while SQLite is locked; the client then tries again, five times at most. Raises
    HTTPStatusError if the last answer is an error.
    """
    return PrefectHttpxSyncClient(base_url=api, auth=auth, timeout=30)


def find(api: str, kind: str, **body: object) -> list[dict[str, Any]]:
    """The server's objects of one kind, such as `flow_runs`, that match the filter `body`."""
    with prefect_client(api) as client:
        objects: list[dict[str, Any]] = client.post(f"/{kind}/filter", json=body).json()
    return objects


def num_workers(client: PrefectHttpxSyncClient, pool: str) -> int:
    """How many workers of the pool are online; 0 as long as there is no such pool."""
    try:
        workers = client.post(f"/work_pools/{pool}/workers/filter", json={}).json()
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            return 0
        raise
    return sum(worker["status"] == "ONLINE" for worker in workers)


def flow_runs_of(api: str, run_id: str) -> list[dict[str, Any]]:
    """The flow runs of this run, one per attempt."""
    runs = find(api, "flow_runs", flow_runs={"name": {"like_": run_id}})
    return [run for run in runs if run["name"].partition(", attempt ")[0] == run_id]


def flow_run_of(api: str, run_id: str) -> dict[str, Any]:
    """The flow run of this run, which had one attempt."""
    (flow_run,) = flow_runs_of(api, run_id)
    return flow_run


def log_messages(api: str, run_id: str) -> list[str]:
    """The log messages of the run's stages, in order."""
    flow_run = flow_run_of(api, run_id)
    logs = find(api, "logs", logs={"flow_run_id": {"any_": [flow_run["id"]]}}, sort="TIMESTAMP_ASC", limit=200)
    return [log["message"] for log in logs]


@dataclass(frozen=True, kw_only=True)
class PrefectEvent:
    """An event of a run, read from the server."""

    kind: str
    """Without the leading `millrace.`."""
    t: float
    """Unix seconds."""
    payload: dict[str, Any]
    related: set[str]
    """Roles of the resources that Prefect added, such as `flow-run`."""


def events_of(prefect_api: str, run_id: str) -> list[PrefectEvent]:
    """All events of the run so far, in order. An event takes a few seconds to arrive."""
    by_run = {"event": {"prefix": ["millrace."]}, "resource": {"id": [f"millrace.run.{run_id}"]}, "order": "ASC"}
    with prefect_client(prefect_api) as client:
        answer = client.post("/events/filter", json={"filter": by_run, "limit": 50})
    return [
        PrefectEvent(
            kind=event["event"].removeprefix("millrace."),
            t=datetime.fromisoformat(event["occurred"]).timestamp(),
            payload=event["payload"],
            related={related["prefect.resource.role"] for related in event["related"]},
        )
        for event in answer.json()["events"]
    ]
