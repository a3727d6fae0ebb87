"""Runs stages on this host for a controller on another, which starts this flow through a work pool of `placement`.

    campaign ─► tasks.remote_stage ─► deployment `stages/<pool>` ─► a worker of the pool ─► this flow ─► stages
                    ▲                                                                               │   ▲
                    └──── the run's store ◄── heartbeats: at work, ended, failed with a sentence ───┘   │
                                     └─────── the controller's heartbeats: draining, or silent ──STOP───┘

The tasks, processes and retries are the same as on the controller's host. When one stage ends by itself, as the
trainer does, this host's part of the attempt ends. Before a campaign starts, `check_pools` checks its work pools.
"""

import shutil
import socket
import threading
from collections.abc import Sequence

from prefect import flow, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import WorkerStatus
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.task_runners import ThreadPoolTaskRunner
from prefect.utilities.schema_tools import validate
from prefect.utilities.schema_tools.validation import ValidationError

from flows.campaign.attempt import handover_folder
from flows.campaign.inputs import check_same_inputs
from flows.campaign.stage_group import StageGroup
from millrace.errors import InputError, PlaceYielded, RunMissing
from millrace.runs.provenance import Provenance, provenance
from millrace.runs.record import CONTROLLER, read_attempt
from millrace.runtime.arguments import StageArguments, attempt_config
from millrace.runtime.heartbeat import SILENT_SECONDS, HeartbeatMonitor, HeartbeatPublisher, own_interface
from storage.errors import NotInStore
from storage.stores.base import Store
from storage.stores.factory import open_store
from tasks.fork_server import STAGES
from tasks.jobs import Job
from tasks.remote_stage import FINAL_ERRORS
from tasks.stages import LONG_RUNNING
from tasks.start import warm_up
from tasks.stop import STOP, STOP_NOW

_POLL_SECONDS = 1.0


@flow(
    name="stages",
    task_runner=ThreadPoolTaskRunner(max_workers=8),  # type: ignore[arg-type]
    persist_result=False,
)
def stages(run_url: str, attempt: int, job: Job) -> None:
    """Runs the stages of `job` for this attempt of the run at `run_url` until they end or drain.

    Raises InputError if this host can't serve that run, and the error of a stage that can't be kept alive.
    """
    STOP.clear()
    STOP_NOW.clear()
    warm_up(process.stage for process in job.processes)
    store = open_store(run_url)
    _check(store, attempt, job)
    with HeartbeatPublisher(
        store,
        job.status_record,
        job.number,
        owner_id=str(runtime.flow_run.id),
        doing=f"on {socket.gethostname()}",
        draining=STOP.is_set,
    ) as publisher:
        try:
            _run(store, run_url, attempt, job)
        except Exception as error:
            final = type(error).__name__ if isinstance(error, FINAL_ERRORS) else None
            publisher.publish(ended=True, sentence=str(error), final=final)
            if isinstance(error, PlaceYielded):
                return
            raise
        publisher.publish(ended=True, sentence=None, final=None)


def _check(store: Store, number: int, job: Job) -> None:
    """Raises InputError unless this host sees the run, has the controller's code and inputs, and is in its network."""
    try:
        attempt = read_attempt(store, number)
    except (RunMissing, NotInStore) as error:
        raise InputError(
            f"host {socket.gethostname()} sees no attempt {number} of a run at {store.url}: expected a storage.root "
            "that the controller and every host of placement share"
        ) from error
    code, controller_code = _code(provenance()), _code(attempt.provenance)
    if code != controller_code:
        raise InputError(
            f"host {socket.gethostname()} runs {code} of Millrace, the controller {controller_code}: "
            "expected the same code on every host"
        )
    config = attempt_config(attempt)
    stages_of_job = {process.stage for process in job.processes}
    check_same_inputs(attempt, config, stages_of_job)
    where = config.placement.train
    if where.network is not None and "train" in stages_of_job:
        own_interface(where.network, "placement.train.network")


def _code(made_by: Provenance) -> str:
    changed = " with changes" if made_by.dirty else ""
    return f"commit {made_by.commit[:12]}{changed}" if made_by.commit else "no commit known"


def _run(store: Store, run_url: str, attempt: int, job: Job) -> None:
    handover = handover_folder(f"{run_url} {job.name}", attempt)
    over = threading.Event()
    threading.Thread(target=_monitor_controller, args=(store, str(attempt), over), daemon=True).start()
    try:
        with StageGroup() as group:
            for process in job.processes:
                arguments = StageArguments(run_url=run_url, attempt=attempt, replica=process.replica, handover=handover)
                group.add(
                    f"{process.stage}-{process.replica}", LONG_RUNNING[process.stage].submit(arguments, process.threads)
                )
            group.wait_for_first()
    finally:
        over.set()
        STAGES.close()
        shutil.rmtree(handover, ignore_errors=True)


def _monitor_controller(store: Store, attempt: str, over: threading.Event) -> None:
    """Sets STOP once the controller drains, is lost, or has been restarted as another attempt."""
    controller = HeartbeatMonitor(store, CONTROLLER, 0)
    while not over.wait(_POLL_SECONDS):
        silent = controller.look() > SILENT_SECONDS
        if silent or controller.status.get("draining") or controller.owner_id not in (None, attempt):
            STOP.set()
            return


def check_pools(remote: Sequence[Job]) -> None:
    """Raises InputError, naming the key, for the first job whose pool can't run it. `remote`: jobs with a work pool."""
    if PREFECT_API_URL.value() is None:
        raise InputError(
            f"{_setting(remote[0])}, but PREFECT_API_URL is not set: "
            "expected the address of the Prefect server that has this work pool"
        )
    with get_client(sync_client=True) as client:
        for pool, job in {str(job.work_pool): job for job in remote}.items():
            _check_pool(client, pool, job)


def _check_pool(client: SyncPrefectClient, pool: str, job: Job) -> None:
    setting = _setting(job)
    try:
        work_pool = client.read_work_pool(pool)
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
        validate(variables, work_pool.base_job_template.get("variables", {}), raise_on_error=True, preprocess=False)
    except ValidationError as error:
        raise InputError(f"{setting}, and that pool does not take its job_variables: {error}") from error
    if work_pool.is_push_pool or work_pool.is_managed_pool:
        return
    workers = client.read_workers_for_work_pool(pool)
    if not any(worker.status == WorkerStatus.ONLINE for worker in workers):
        raise InputError(f"{setting}, but no worker of that pool is online: expected `make host POOL={pool}` on a host")


def _setting(job: Job) -> str:
    return f"placement.{job.processes[0].stage}.work_pool is {job.work_pool!r}"
