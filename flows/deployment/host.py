"""`make host POOL=…`: lets this host run stages of campaigns whose controller is on another host.

    server there? ─► work pool ─► deployment stages/<pool> ─► worker, until SIGTERM or Ctrl-C

A pool of a type other than `process`, such as `kubernetes`, must exist already (UI, `prefect work-pool create`). Only
the deployment is added to it, and the pool's own worker runs it.
"""

import argparse
import asyncio
import contextlib
import sys
from collections.abc import Sequence

from prefect.client.orchestration import get_client
from prefect.client.schemas.actions import WorkPoolCreate
from prefect.exceptions import ObjectAlreadyExists
from prefect.utilities.callables import parameter_schema

from flows.campaign.remote_stages import stages
from flows.deployment.deploy import USER_ERROR, server
from flows.deployment.server import bypass_proxies
from flows.deployment.worker import MOST_RUNS, work
from millrace.errors import InputError

_PROCESS = "process"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the worker has been stopped, 2 after a user error, which it prints in one sentence."""
    parser = argparse.ArgumentParser(prog="python -m flows.deployment.host", description=__doc__.partition("\n")[0])
    parser.add_argument("pool", help="name of the work pool; a process pool is created if it does not exist")
    parser.add_argument("--limit", type=int, default=MOST_RUNS, help="number of jobs that run here at once")
    given = parser.parse_args(argv)
    pool: str = given.pool
    if given.limit < 1:
        print(f"millrace: --limit is {given.limit}; expected at least 1", file=sys.stderr)
        return USER_ERROR
    bypass_proxies()
    try:
        url = server()
    except InputError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return USER_ERROR
    pool_type = asyncio.run(_deploy(pool))
    print(f"work pool {pool} ({pool_type}) at {url} has the deployment stages/{pool}", flush=True)
    if pool_type == _PROCESS:
        asyncio.run(work(pool, given.limit))
    return 0


async def _deploy(pool: str) -> str:
    """Returns the pool's type."""
    async with get_client() as client:
        with contextlib.suppress(ObjectAlreadyExists):
            await client.create_work_pool(WorkPoolCreate(name=pool, type=_PROCESS))
        pool_type = (await client.read_work_pool(pool)).type
        await client.create_deployment(
            await client.create_flow(stages),
            name=pool,
            description="Stages of a campaign whose controller is on another host. Campaigns start it, not people.",
            tags=["millrace", "stages"],
            # By module name, because the path of the code may differ from host to host.
            entrypoint="flows.campaign.remote_stages.stages",
            work_pool_name=pool,
            # A pipe to the worker would break when the worker is killed, and the stages with it.
            job_variables={"stream_output": False} if pool_type == _PROCESS else {},
            parameter_openapi_schema=parameter_schema(stages).model_dump_for_openapi(),
        )
    return pool_type


if __name__ == "__main__":
    sys.exit(main())
