"""`make deploy` and `make host POOL=…`: put deployments on a Prefect server, then run a worker until it is stopped.

    make deploy   pool `millrace`, queues ─► prefect.yaml ─► automations ─┐
    make host     work pool POOL ─► deployment stages/POOL ───────────────┴─► worker, until SIGTERM or Ctrl-C

Deploying again updates everything, but keeps changes that people made on the server: which schedules and automations
are switched on, and how many campaigns may run at once. A pool of a type other than `process`, such as `kubernetes`,
must exist before `make host`, which then only adds the deployment: the pool's own worker runs it.
"""

import argparse
import asyncio
import contextlib
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from uuid import UUID

import yaml
from prefect.automations import AutomationCore
from prefect.client.orchestration import PrefectClient, get_client
from prefect.client.schemas.actions import WorkPoolCreate, WorkPoolUpdate
from prefect.client.schemas.filters import WorkPoolFilter, WorkPoolFilterName
from prefect.client.schemas.responses import DeploymentResponse
from prefect.exceptions import ObjectAlreadyExists, PrefectHTTPStatusError
from prefect.settings import PREFECT_API_URL, PREFECT_UI_URL
from prefect.utilities.callables import parameter_schema

from flows.campaign.remote_stages import stages
from flows.deployment.server import bypass_proxies, check_answers
from flows.deployment.worker import MAX_RUNS, work
from millrace.errors import InputError

REPOSITORY = Path(__file__).parents[2]
POOL = "millrace"
QUEUES = {"urgent": 1, "default": 2, "idle": 3}
"""Priority by name; the lowest number is served first."""
ALERTS = "millrace-alerts"
"""Name of the notification blocks, one of each type, that alerts go to."""


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the worker has been stopped, 2 after a user error, which it prints in one line."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployment.deploy", description=__doc__.partition("\n")[0])
    parser.add_argument("--campaigns", type=int, metavar="N", help="how many may run at once (at first: 1)")
    parser.add_argument("--host", metavar="POOL", help="only run stages for controllers on other hosts, in this work "
                        "pool; a process pool is created if it does not exist")  # fmt: skip
    parser.add_argument("--limit", type=int, default=MAX_RUNS, help="with --host: number of jobs that run here at once")
    arguments = parser.parse_args(argv)
    bypass_proxies()
    url = PREFECT_API_URL.value()
    try:
        if arguments.limit < 1:
            raise InputError(key="--limit", read=arguments.limit, expected="at least 1")
        if not url:
            expected = "the address of a Prefect server, such as http://127.0.0.1:4200/api"
            raise InputError(key="PREFECT_API_URL", read="not set", expected=expected)
        check_answers(url)
        try:
            pool_type, deployments = asyncio.run(_deploy(arguments.host, arguments.campaigns))
        except PrefectHTTPStatusError as error:
            expected = "the API of a Prefect server, with PREFECT_API_AUTH_STRING set if it has a password"
            raise InputError(file=url, read=str(error), expected=expected) from error
    except InputError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return 2
    pool = arguments.host or POOL
    print(f"work pool {pool} ({pool_type}) at {url} has the deployments {', '.join(deployments)}")
    if arguments.host is None:
        print(f"start them and see their runs at {PREFECT_UI_URL.value()}/deployments", flush=True)
    if pool_type == "process":
        os.chdir(REPOSITORY)
        asyncio.run(work(pool, arguments.limit))
    return 0


async def _deploy(host_pool: str | None, campaigns: int | None) -> tuple[str, list[str]]:
    """Returns the pool's type and the names of its deployments."""
    async with get_client() as client:
        if host_pool is None:
            await _put_pool(client, campaigns)
            await _put_project(client)
            return "process", sorted(deployment.name for deployment in await _deployments(client))
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=host_pool, type="process"))
        pool_type = (await client.read_work_pool(host_pool)).type
        await client.create_deployment(
            await client.create_flow(stages),
            name=host_pool,
            description="Stages of a campaign whose controller is on another host. Campaigns start it, not people.",
            tags=["millrace", "stages"],
            # By module name, because the path of the code may differ from host to host.
            entrypoint="flows.campaign.remote_stages.stages",
            work_pool_name=host_pool,
            # A pipe to the worker would break when the worker is killed, and the stages with it.
            job_variables={"stream_output": False} if pool_type == "process" else {},
            parameter_openapi_schema=parameter_schema(stages).model_dump_for_openapi(),
        )
        return pool_type, [f"stages/{host_pool}"]


async def _put_pool(client: PrefectClient, campaigns: int | None) -> None:
    try:
        await client.create_work_pool(WorkPoolCreate(name=POOL, type="process", concurrency_limit=campaigns or 1))
    except ObjectAlreadyExists:
        if campaigns is not None:
            await client.update_work_pool(POOL, WorkPoolUpdate(concurrency_limit=campaigns))
    queue_ids = {queue.name: queue.id for queue in await client.read_work_queues(work_pool_name=POOL)}
    for name, priority in QUEUES.items():
        if name in queue_ids:
            await client.update_work_queue(queue_ids[name], priority=priority)
        else:
            await client.create_work_queue(name, priority=priority, work_pool_name=POOL)


async def _put_project(client: PrefectClient) -> None:
    """Deploys prefect.yaml and the automations. Raises InputError with Prefect's output if it refuses the file."""
    deployments = await _deployments(client)
    active = {schedule.id: schedule.active for deployment in deployments for schedule in deployment.schedules}
    result = subprocess.run(
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
    if result.returncode != 0:
        raise InputError(file="prefect.yaml", read=f"it can't be deployed: {result.stdout}")
    # Prefect has reset the schedules to those of the file.
    for deployment in await _deployments(client):
        for schedule in deployment.schedules:
            if (former := active.get(schedule.id, schedule.active)) != schedule.active:
                await client.update_deployment_schedule(deployment.id, schedule.id, active=former)
    for automation in automations(await _alert_blocks(client)):
        existing = await client.read_automations_by_name(automation.name)
        if existing:
            # The client omits unset fields, and without its type the server mistakes an action for another. After
            # dumping and validating, every field counts as set.
            values = {**automation.model_dump(exclude={"owner_resource"}), "enabled": existing[0].enabled}
            await client.update_automation(existing[0].id, AutomationCore.model_validate(values))
        else:
            await client.create_automation(automation)


def automations(alert_blocks: Sequence[UUID] = ()) -> list[AutomationCore]:
    """Reads the automations of this project; the one that alerts people only if there are blocks to notify."""
    *definitions, alert = yaml.safe_load(Path(__file__).with_name("automations.yaml").read_text(encoding="utf-8"))
    if alert_blocks:
        (notify,) = alert["actions"]
        definitions.append({**alert, "actions": [{**notify, "block_document_id": block} for block in alert_blocks]})
    return [AutomationCore.model_validate(definition) for definition in definitions]


async def _alert_blocks(client: PrefectClient) -> list[UUID]:
    """Ids of the server's notification blocks named `ALERTS`."""
    return [
        block.id
        for block in await client.read_block_documents(include_secrets=False)
        if block.name == ALERTS and block.block_schema and "notify" in block.block_schema.capabilities
    ]


async def _deployments(client: PrefectClient) -> list[DeploymentResponse]:
    return await client.read_deployments(work_pool_filter=WorkPoolFilter(name=WorkPoolFilterName(any_=[POOL])))


if __name__ == "__main__":
    sys.exit(main())
