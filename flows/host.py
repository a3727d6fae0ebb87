"""`make host POOL=…`: lets this host run stages of campaigns whose controller is elsewhere.

    server there? ─► work pool ─► deployment stages/<pool> ─► worker, until SIGTERM or Ctrl-C

A pool of another type than `process`, such as `kubernetes`, is made in the UI or by `prefect work-pool create` first:
then nothing but the deployment is put there, and the pool's own worker runs it.
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

from flows.deploy import server
from flows.draining_worker import work
from flows.stages import stages
from millrace.errors import InputError

_MISTAKE = 2
_PROCESS = "process"


def main(argv: Sequence[str] | None = None) -> int:
    """Returns 0 once the worker has been stopped, 2 after a person's mistake, with one sentence."""
    parser = argparse.ArgumentParser(prog="python -m flows.host", description=__doc__.partition("\n")[0])
    parser.add_argument("pool", help="name of the work pool; a process pool is made where there is none")
    pool: str = parser.parse_args(argv).pool
    try:
        url = server()
    except InputError as error:
        print(f"millrace: {error}", file=sys.stderr)
        return _MISTAKE
    pool_type = asyncio.run(_deploy(pool))
    print(f"work pool {pool} ({pool_type}) at {url} has the deployment stages/{pool}", flush=True)
    if pool_type == _PROCESS:
        asyncio.run(work(pool))
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
            description="Stages of a campaign whose controller is elsewhere. Campaigns start it; people need not.",
            tags=["millrace", "stages"],
            # By its module: where the code lies may differ from host to host.
            entrypoint="flows.stages.stages",
            work_pool_name=pool,
            # A pipe to the worker would break when the worker is killed, and the stages with it.
            job_variables={"stream_output": False} if pool_type == _PROCESS else {},
            parameter_openapi_schema=parameter_schema(stages).model_dump_for_openapi(),
        )
    return pool_type


if __name__ == "__main__":
    sys.exit(main())
