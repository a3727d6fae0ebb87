"""The API of a Prefect server, asked as Prefect's own clients ask it: once more if the server is busy."""

from typing import Any

import httpx
from prefect.client.base import PrefectHttpxSyncClient


def prefect_client(api: str, auth: tuple[str, str] | None = None) -> PrefectHttpxSyncClient:
    """A client of the server whose API is at `api`; `auth`: user and password.

    The server answers 503 while SQLite is locked; the client then waits and tries again, five times at most. Raises
    HTTPStatusError if the answer is no success in the end.
    """
    return PrefectHttpxSyncClient(base_url=api, auth=auth, timeout=30)


def find(api: str, what: str, **body: object) -> list[dict[str, Any]]:
    """The server's objects of one kind, such as `flow_runs`, as its filter finds them."""
    with prefect_client(api) as client:
        found: list[dict[str, Any]] = client.post(f"/{what}/filter", json=body).json()
    return found


def has_worker(client: PrefectHttpxSyncClient, pool: str) -> bool:
    """Whether a worker of the pool is online; False as long as there is no such pool."""
    return num_workers(client, pool) > 0


def num_workers(client: PrefectHttpxSyncClient, pool: str) -> int:
    """How many workers of the pool are online; 0 as long as there is no such pool."""
    try:
        workers = client.post(f"/work_pools/{pool}/workers/filter", json={}).json()
    except httpx.HTTPStatusError as error:
        if error.response.status_code == httpx.codes.NOT_FOUND:
            return 0
        raise
    return sum(worker["status"] == "ONLINE" for worker in workers)
