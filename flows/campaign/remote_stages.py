"""Runs stages on this host for a controller on another, which starts this flow through a work pool of `placement`.

    campaign ─► tasks.remote_stage ─► deployment `stages/<pool>` ─► a worker of the pool ─► this flow ─► stages
                    ▲                                                                               │   ▲
                    └──── the run's store ◄── heartbeats: at work, ended, failed with a sentence ───┘   │
                                     └─────── the controller's heartbeats: draining, or silent ──STOP───┘

The tasks, processes and retries are the same as on the controller's host. When a stage ends, as the trainer does, this
host's part of the attempt ends. Before a campaign starts, `check_pools` checks its work pools.
"""

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

from flows.campaign.attempt import handover_folder, run_together, submit_stages
from flows.campaign.inputs import check_same_inputs
from millrace.errors import InputError, PlaceYielded, RunMissing
from millrace.runs.attempt_config import attempt_config
from millrace.runs.provenance import Provenance, provenance
from millrace.runs.record import CONTROLLER, read_attempt
from millrace.runtime.arguments import StageArguments
from millrace.runtime.heartbeat import SILENT_SECONDS, HeartbeatMonitor, HeartbeatPublisher
from millrace.runtime.interfaces import own_interface
from storage.errors import NotInStore
from storage.stores.base import Store
from storage.stores.factory import open_store
from tasks.fork_server import STAGES
from tasks.jobs import Job
from tasks.remote_stage import FINAL_ERRORS
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
    _check_host(store, attempt, job)
    with HeartbeatPublisher(
        store,
        job.status_record,
        job.number,
        owner_id=str(runtime.flow_run.id),
        doing=f"on {socket.gethostname()}",
        draining=STOP.is_set,
    ) as publisher:
        over = threading.Event()
        threading.Thread(target=_monitor_controller, args=(store, str(attempt), over), daemon=True).start()
        try:
            with handover_folder(f"{run_url} {job.name}", attempt) as handover:
                arguments = StageArguments(run_url=run_url, attempt=attempt, replica=0, handover=handover)
                run_together(submit_stages(job, arguments))
        except Exception as error:
            final = type(error).__name__ if isinstance(error, FINAL_ERRORS) else None
            publisher.publish(ended=True, sentence=str(error), final=final)
            if not isinstance(error, PlaceYielded):
                raise
        else:
            publisher.publish(ended=True, sentence=None, final=None)
        finally:
            over.set()
            STAGES.close()


def _check_host(store: Store, number: int, job: Job) -> None:
    """Raises InputError unless this host sees the run, has the controller's code and inputs, and is in its network."""
    host = f"host {socket.gethostname()}"
    try:
        attempt = read_attempt(store, number)
    except (RunMissing, NotInStore) as error:
        raise InputError(
            f"{host} sees no attempt {number} of a run at {store.url}",
            expected="a storage.root that the controller and every host of placement share",
        ) from error
    code, controller_code = _code(provenance()), _code(attempt.provenance)
    if code != controller_code:
        raise InputError(
            f"{host} runs {code} of Millrace, the controller {controller_code}", expected="the same code on every host"
        )
    config = attempt_config(attempt)
    job_stages = {process.stage for process in job.processes}
    check_same_inputs(attempt, config, job_stages)
    network = config.placement.train.network
    if network is not None and "train" in job_stages:
        own_interface(network, "placement.train.network")


def _code(made_by: Provenance) -> str:
    changed = " with changes" if made_by.dirty else ""
    return f"commit {made_by.commit[:12]}{changed}" if made_by.commit else "no commit known"


def _monitor_controller(store: Store, attempt: str, over: threading.Event) -> None:
    """Sets STOP once the controller drains, is lost, or has been restarted as another attempt."""
    controller = HeartbeatMonitor(store, CONTROLLER, 0)
    while not over.wait(_POLL_SECONDS):
        silent = controller.look() > SILENT_SECONDS
        if silent or controller.status.get("draining") or controller.owner_id not in (None, attempt):
            STOP.set()
            return


def check_pools(remote_jobs: Sequence[Job]) -> None:
    """Raises InputError, naming the key, for the first job with a work pool that can't run it."""
    jobs = {str(job.work_pool): job for job in remote_jobs}
    if PREFECT_API_URL.value() is None:
        raise _pool_error(remote_jobs[0], "PREFECT_API_URL is not set", "the address of the Prefect server that has it")
    with get_client(sync_client=True) as client:
        for pool, job in jobs.items():
            _check_pool(client, pool, job)


def _check_pool(client: SyncPrefectClient, pool: str, job: Job) -> None:
    host = f"`make host POOL={pool}` on one of its hosts"
    try:
        work_pool = client.read_work_pool(pool)
    except ObjectNotFound as error:
        raise _pool_error(job, f"the Prefect server at {client.api_url} has no such work pool", host) from error
    try:
        deployment = client.read_deployment_by_name(f"stages/{pool}")
    except ObjectNotFound as error:
        raise _pool_error(job, f"that pool has no deployment stages/{pool}", host) from error
    variables = {**deployment.job_variables, **job.job_variables}
    try:
        validate(variables, work_pool.base_job_template.get("variables", {}), raise_on_error=True, preprocess=False)
    except ValidationError as error:
        raise _pool_error(
            job, f"that pool does not take its job_variables: {error}", "variables of the pool"
        ) from error
    if work_pool.is_push_pool or work_pool.is_managed_pool:
        return
    if not any(worker.status == WorkerStatus.ONLINE for worker in client.read_workers_for_work_pool(pool)):
        raise _pool_error(job, "no worker of that pool is online", host)


def _pool_error(job: Job, reason: str, expected: str) -> InputError:
    key = f"placement.{job.processes[0].stage}.work_pool"
    return InputError(key=key, read=f"{job.work_pool!r}, but {reason}", expected=expected)
