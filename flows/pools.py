"""Work pools that stages are placed in: there, with a deployment and a worker, before a campaign begins."""

from collections.abc import Sequence

from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from millrace.errors import InputError
from millrace.places import Place


def check_pools(places: Sequence[Place]) -> None:
    """Raises InputError, naming the key, for the first place whose pool can't run it."""
    if PREFECT_API_URL.value() is None:
        first = next(place for place in places if place.work_pool is not None)
        raise InputError(
            f"{_key(first)} is {first.work_pool!r}, but PREFECT_API_URL is not set: "
            "expected the address of the Prefect server that has this work pool"
        )
    with get_client(sync_client=True) as client:
        for pool, place in {place.work_pool: place for place in places if place.work_pool is not None}.items():
            _check(client, pool, place)


def _check(client: SyncPrefectClient, pool: str, place: Place) -> None:
    said = f"{_key(place)} is {pool!r}"
    try:
        found = client.read_work_pool(pool)
    except ObjectNotFound as error:
        raise InputError(f"{said}, but the Prefect server at {client.api_url} has no such work pool") from error
    try:
        deployment = client.read_deployment_by_name(f"stages/{pool}")
    except ObjectNotFound as error:
        raise InputError(
            f"{said}, but that pool has no deployment stages/{pool}: expected `make host POOL={pool}` on a host of it"
        ) from error
    try:
        variables = {**deployment.job_variables, **place.job_variables}
        validate(variables, found.base_job_template.get("variables", {}), raise_on_error=True, preprocess=False)
    except ValidationError as error:
        raise InputError(f"{said}, and that pool does not take its job_variables: {error}") from error
    if found.is_push_pool or found.is_managed_pool:
        return
    workers = client.read_workers_for_work_pool(pool)
    if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
        raise InputError(f"{said}, but no worker of that pool is online: expected `make host POOL={pool}` on a host")


def _key(place: Place) -> str:
    return f"placement.{place.seats[0].stage}.work_pool"
