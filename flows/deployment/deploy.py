"""`make deploy`: deploys this project to a Prefect server, then runs a worker until it is stopped.

    server there? ─► pool, queues ─► prefect.yaml ─► automations ─► worker, until SIGTERM or Ctrl-C

Running it again updates everything, but keeps what people have changed: which schedules and automations are switched
on, and how many campaigns may run at once.
"""

import argparse
import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import httpx
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists
from prefect.settings import PREFECT_API_AUTH_STRING, PREFECT_API_URL

from flows.deployment.automations import automations, put_automations
from flows.deployment.server import bypass_proxies
from flows.deployment.worker import work
from millrace.errors import InputError

REPOSITORY = Path(__file__).parents[2]
POOL = "millrace"
QUEUES = {"urgent": 1, "default": 2, "idle": 3}
"""Priority by name; the lowest number is served first."""
_ANSWER_SECONDS = 10.0
USER_ERROR = 2


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the worker has been stopped, 2 after a user error, which it prints in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployment.deploy", description=__doc__.partition("\n")[0])
    parser.add_argument("--campaigns", type=int, metavar="N", help="how many may run at once (at first: 1)")
    arguments = parser.parse_args(argv)
    bypass_proxies()
    try:
        url = server()
        names = asyncio.run(_deploy(arguments.campaigns))
    except InputError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return USER_ERROR
    print(f"deployed to {url}: {', '.join(names)}; a worker of this host takes their runs", flush=True)
    os.chdir(REPOSITORY)
    asyncio.run(work(POOL))
    return 0


def server() -> str:
    """The API's address. Raises InputError if no Prefect server answers there, or it rejects our password."""
    url: str | None = PREFECT_API_URL.value()
    if not url:
        raise InputError("PREFECT_API_URL is not set: expected a Prefect server's, such as http://127.0.0.1:4200/api")
    secret: str | None = PREFECT_API_AUTH_STRING.value()
    user, _, password = (secret or "").partition(":")
    try:
        answer = httpx.get(f"{url}/admin/version", auth=(user, password) if secret else None, timeout=_ANSWER_SECONDS)
    except httpx.TransportError as error:
        raise InputError(f"no Prefect server answers at {url} ({error}): start one with `make server`") from error
    if answer.status_code == httpx.codes.UNAUTHORIZED:
        what = "does not accept this PREFECT_API_AUTH_STRING" if secret else "wants PREFECT_API_AUTH_STRING to be set"
        raise InputError(f"the Prefect server at {url} {what}")
    if answer.status_code != httpx.codes.OK:
        raise InputError(f"{url} answers with {answer.status_code}: expected a Prefect server's API there")
    return url


async def _deploy(campaigns: int | None) -> list[str]:
    """Returns the names of the pool's deployments."""
    async with get_client() as client:
        await _put_pool(client, campaigns)
        active = await _active_schedules(client)
        _put_deployments()
        await _restore(client, active)
        await put_automations(client, automations())
        return sorted(deployment.name for deployment in await _deployments(client))


async def _put_pool(client: PrefectClient, campaigns: int | None) -> None:
    try:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=campaigns or 1))
    except ObjectAlreadyExists:
        if campaigns is not None:
            await client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=campaigns))
    there = {queue.name: queue for queue in await client.read_work_queues(work_pool_name=POOL)}
    for name, priority in QUEUES.items():
        if name in there:
            await client.update_work_queue(there[name].id, priority=priority)
        else:
            await client.create_work_queue(name, priority=priority, work_pool_name=POOL)


def _put_deployments() -> None:
    """Runs `prefect deploy` on prefect.yaml. Raises InputError with its output if it fails."""
    ended = subprocess.run(
        [sys.executable, "-m", "prefect", "--no-prompt", "deploy", "--all"],
        cwd=REPOSITORY,
        # prefect.yaml refers to the checkout as PWD.
        env={**os.environ, "PWD": str(REPOSITORY)},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode != 0:
        raise InputError(f"prefect.yaml can't be deployed:\n{ended.stdout}")


async def _deployments(client: PrefectClient) -> list[DeploymentResponse]:
    return await client.read_deployments(work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])))


async def _active_schedules(client: PrefectClient) -> dict[UUID, bool]:
    """Whether each schedule is switched on, by its id."""
    return {schedule.id: schedule.active for one in await _deployments(client) for schedule in one.schedules}


async def _restore(client: PrefectClient, active: dict[UUID, bool]) -> None:
    for deployment in await _deployments(client):
        for schedule in deployment.schedules:
            wanted = active.get(schedule.id, schedule.active)
            if wanted != schedule.active:
                await client.update_deployment_schedule(deployment.id, schedule.id, active=wanted)


if __name__ == "__main__":
    sys.exit(main())
