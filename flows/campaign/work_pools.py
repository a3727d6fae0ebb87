"""Checks the work pools named in `placement` before a campaign starts: pool, deployment and worker must exist."""

from collections.abc import Sequence

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from millrace.errors import InputError
from tasks.jobs import Job


def check_pools(remote: Sequence[Job]) -> None:
    """Raises InputError, naming the key, for the first job whose pool can't run it. `remote`: jobs with a work pool."""
    if PREFECT_API_URL.value() is None:
        raise InputError(
            f"{_setting(remote[0])}, but PREFECT_API_URL is not set: "
            "expected the address of the Prefect server that has this work pool"
        )
    with get_client(sync_client=True) as client:
        for pool, job in {str(job.work_pool): job for job in remote}.items():
            _check(client, pool, job)


def _check(client: SyncPrefectClient, pool: str, job: Job) -> None:
    setting = _setting(job)
    try:
        found = client.read_work_pool(pool)
    except ObjectNotFound as error:
        raise InputError(f"{setting}, but the Prefect server at {client.api_url} has no such work pool") from error
    try:
        deployment = client.read_deployment_by_name(f"stages/{pool}")
    except ObjectNotFound as error:
        raise InputError(
            f"{setting}, but that pool has no deployment stages/{pool}: "
            f"expected `make host POOL={pool}` on one of its hosts"
        ) from error
    try:
        variables = {**deployment.job_variables, **job.job_variables}
        validate(variables, found.base_job_template.get("variables", {}), raise_on_error=True, preprocess=False)
    except ValidationError as error:
        raise InputError(f"{setting}, and that pool does not take its job_variables: {error}") from error
    if found.is_push_pool or found.is_managed_pool:
        return
    workers = client.read_workers_for_work_pool(pool)
    if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
        raise InputError(f"{setting}, but no worker of that pool is online: expected `make host POOL={pool}` on a host")


def _setting(job: Job) -> str:
    return f"placement.{job.processes[0].stage}.work_pool is {job.work_pool!r}"
