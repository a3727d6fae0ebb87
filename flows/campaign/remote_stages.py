"""Stages on another host: the task that has a work pool's worker run them, and the flow that runs them there.

    campaign ─► run_remotely ─► deployment `stages/<pool>` ─► a worker of the pool ─► flow `stages` ─► stages
        ▲   ▲                                                                             │   ▲
        │   └── the run's store ◄── heartbeats: at work, ended, failed with its error ────┘   │
        │                └───────── the controller's heartbeats: draining, or silent ────STOP─┘
        └── states of the flow run: crashed, cancelled, or failed because the host does not see the store

A host that is silent for too long counts as lost, and the task's retry runs the job somewhere else. The host learns
from the controller's heartbeats when to drain, which needs no Prefect server.
"""

import contextlib
import contextvars
import socket
import threading
import time
from collections.abc import Sequence
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

import httpx
from prefect import Task, flow, get_run_logger, runtime, task
from prefect.client.orchestration import SyncPrefectClient, get_client
from prefect.client.schemas.objects import FlowRun, State, TaskRun, WorkerStatus
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound, PrefectException
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from configs.schema import RunConfig
from flows.campaign.attempt import handover_folder, run_together, submit_stages
from flows.campaign.inputs import check_same_inputs
from flows.campaign.prepare import check_on_host
from flows.campaign.user_errors import fails_with_one_line
from millrace.errors import InputError, PlaceYielded, RunMissing, StageDied, from_json, to_json
from millrace.forking.stages import STAGES
from millrace.runs.provenance import Provenance, provenance
from millrace.runs.record import CONTROLLER, Attempt, read_attempt
from millrace.runtime.arguments import StageArguments, attempt_config
from millrace.runtime.heartbeat import SILENT_SECONDS, HeartbeatMonitor, HeartbeatPublisher, own_interface
from storage.errors import NotInStore
from storage.stores.base import Store
from storage.stores.factory import open_store
from tasks.device_leases import devices_when_free
from tasks.events import FlowRunStates, emit
from tasks.jobs import Job
from tasks.restart_budget import keep_going, own_budget
from tasks.stages import STAGE_TASK
from tasks.start import warm_up
from tasks.stop import STOP, STOP_NOW

_POLL_SECONDS = 1.0
_ACCEPT_SECONDS = 25.0
"""After this time, a job that no worker has accepted is reported."""
_REPORT_SECONDS = 40.0
"""For a host to report that its stages have drained."""
_LATE_SECONDS = 5.0
"""For a host's last heartbeat to arrive through the store once its flow run has ended."""


def request_place_again(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """Decides as `keep_going`, but a place that was given back to the pool is requested again, behind other jobs."""
    if isinstance(state.result(raise_on_failure=False), PlaceYielded):
        return not STOP.is_set()
    return keep_going(task, task_run, state)


@task(
    name="place",
    task_run_name="{job.name}@{job.work_pool}",
    **STAGE_TASK | {"retry_condition_fn": request_place_again},
)
def run_remotely(arguments: StageArguments, job: Job) -> None:
    """Has the work pool of `job` run its stages until they end or drain.

    Raises the other host's error, and StageDied if that host is lost.
    """
    run_url = arguments.run_url
    store = open_store(run_url)
    drain_seconds = attempt_config(read_attempt(store, arguments.attempt)).supervision.drain_seconds
    budget = own_budget(job.name, run_url)
    flow_run = run_deployment(
        f"stages/{job.work_pool}",
        parameters={"run_url": run_url, "attempt": arguments.attempt, "job": job.model_dump(mode="json")},
        flow_run_name=f"{job.name} of {PurePosixPath(run_url).name}",
        job_variables=job.job_variables,
        timeout=0,
    )
    # A coroutine only inside an event loop, and there is none here.
    assert isinstance(flow_run, FlowRun)
    remote = _RemoteStage(store, job, flow_run.id, drain_seconds)
    try:
        with FlowRunStates(flow_run.id) as states:
            remote.monitor(states)
    finally:
        budget.add_work(remote.at_work_seconds, SILENT_SECONDS)


class _RemoteStage:
    """The flow run `stages` of a job, as seen from the controller."""

    def __init__(self, store: Store, job: Job, flow_run_id: UUID, drain_seconds: float) -> None:
        self._job = job
        self._run_url = store.url
        self._flow_run_id = flow_run_id
        self._drain_seconds = drain_seconds
        self._heartbeats = HeartbeatMonitor(store, job.status_record, job.number)
        self._submitted = time.monotonic()
        self._accepted: float | None = None
        self._waiting_reported = False

    @property
    def at_work_seconds(self) -> float:
        """Time since a host accepted the job."""
        return 0.0 if self._accepted is None else time.monotonic() - self._accepted

    def monitor(self, flow_run: FlowRunStates) -> None:
        """Waits until the job has ended, or STOP is set before a host accepted it. Raises as `run_remotely` does."""
        stopping: float | None = None
        ended: float | None = None
        while True:
            now = time.monotonic()
            silent_seconds = self._heartbeats.look()
            # A status record of an earlier flow run says nothing about this one.
            status = self._heartbeats.status if self._heartbeats.owner_id == str(self._flow_run_id) else {}
            where = f"{self._job.name} of work pool {self._job.work_pool}{' on ' + status['host'] if status else ''}"
            if status.get("ended"):
                if (error := status.get("error")) is not None:
                    raise from_json(error, where)
                return
            if status:
                self._accepted = self._accepted or now
                if silent_seconds > SILENT_SECONDS:
                    self._give_up()
                    raise StageDied(f"{where} has been silent for {silent_seconds:.0f} s: it counts as lost")
            elif STOP.is_set():
                self._give_up()
                return
            elif now - self._submitted > _ACCEPT_SECONDS and not self._waiting_reported:
                self._report_waiting(now - self._submitted)
            if flow_run.states and (final := flow_run.states[-1]).is_final():
                ended = ended or now
                if now - ended > _LATE_SECONDS:
                    if final.is_failed() and not status:
                        # It failed before its first heartbeat: the host does not see the run's store.
                        raise InputError(final.message or final.name, file=where)
                    raise StageDied(f"{where}: its flow run has ended as {final.name}: {final.message}")
            if STOP.is_set():
                stopping = stopping or now
                if STOP_NOW.is_set() or now - stopping > self._drain_seconds + _REPORT_SECONDS:
                    self._give_up()
                    raise StageDied(f"{where} has not drained after {now - stopping:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _report_waiting(self, seconds: float) -> None:
        self._waiting_reported = True
        sentence = f"no worker of work pool {self._job.work_pool} has taken {self._job.name} for {seconds:.0f} s"
        get_run_logger().error(sentence)
        emit("placement.waiting", self._run_url, {"stage": self._job.name, "sentence": sentence})

    def _give_up(self) -> None:
        """Keeps workers from starting or continuing the flow run, if the server can be reached."""

        def cancel() -> None:
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                state: State[Any] = Cancelled(message="given up by its campaign")
                client.set_flow_run_state(self._flow_run_id, state, force=True)

        # A copy of this context has the server's address.
        threading.Thread(target=contextvars.copy_context().run, args=(cancel,), daemon=True).start()


@flow(name="stages", task_runner=ThreadPoolTaskRunner(max_workers=8), persist_result=False)  # type: ignore[arg-type]
@fails_with_one_line
def stages(run_url: str, attempt: int, job: Job) -> None:
    """Runs the stages of `job` for this attempt of the run at `run_url` until they end or drain.

    Raises InputError if this host can't serve that run, and the error of a stage that can't be kept alive.
    """
    STOP.clear()
    STOP_NOW.clear()
    warm_up(process.stage for process in job.processes)
    store, made = _open_run(run_url, attempt)
    with HeartbeatPublisher(
        store,
        job.status_record,
        job.number,
        owner_id=str(runtime.flow_run.id),
        doing=f"on {socket.gethostname()}",
        host=socket.gethostname(),
        draining=STOP.is_set,
    ) as publisher:
        over = threading.Event()
        threading.Thread(target=_monitor_controller, args=(store, str(attempt), over), daemon=True).start()
        try:
            config = _check_host(made, job)
            with (
                devices_when_free(config, job.members, store.url) as assignment,
                handover_folder(f"{run_url} {job.name}", attempt) as handover,
            ):
                arguments = StageArguments(run_url=run_url, attempt=attempt, replica=0, handover=handover)
                run_together(submit_stages(job, arguments, assignment))
        except Exception as error:
            publisher.publish(ended=True, error=to_json(error))
            if not isinstance(error, PlaceYielded):
                raise
        else:
            publisher.publish(ended=True, error=None)
        finally:
            over.set()
            STAGES.close()


def _open_run(run_url: str, number: int) -> tuple[Store, Attempt]:
    """Opens the run's store and reads the attempt. Raises InputError if this host does not see it."""
    store = open_store(run_url)
    try:
        return store, read_attempt(store, number)
    except (RunMissing, NotInStore) as error:
        raise InputError(
            f"host {socket.gethostname()} sees no attempt {number} of a run at {store.url}",
            expected="a storage.root that the controller and every host of placement share",
        ) from error


def _check_host(attempt: Attempt, job: Job) -> RunConfig:
    """Returns the attempt's config.

    Raises InputError unless this host has the controller's code and inputs, is in its network, and can run the job.
    """
    code, controller_code = _code(provenance()), _code(attempt.provenance)
    if code != controller_code:
        read = f"host {socket.gethostname()} runs {code} of Millrace, the controller {controller_code}"
        raise InputError(read, expected="the same code on every host")
    config = attempt_config(attempt)
    job_stages = {process.stage for process in job.processes}
    check_same_inputs(attempt, config, job_stages)
    network = config.placement.train.network
    if network is not None and "train" in job_stages:
        own_interface(network)
    check_on_host(config, job.members, attempt.inputs)
    return config


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
    """Raises InputError, naming the key, for the first job whose work pool can't run it."""
    configured = PREFECT_API_URL.value() is not None
    with get_client(sync_client=True) if configured else contextlib.nullcontext() as client:
        for pool, job in {str(job.work_pool): job for job in remote_jobs}.items():
            reason = "PREFECT_API_URL is not set" if client is None else _pool_problem(client, pool, job)
            if reason is not None:
                raise InputError(
                    key=f"placement.{job.processes[0].stage}.work_pool",
                    read=f"{pool!r}, but {reason}",
                    expected=f"a pool for which `make host POOL={pool}` runs on a host",
                )


def _pool_problem(client: SyncPrefectClient, pool: str, job: Job) -> str | None:
    """Why the work pool can't run the job; None if it can."""
    try:
        work_pool = client.read_work_pool(pool)
    except ObjectNotFound:
        return f"the Prefect server at {client.api_url} has no such work pool"
    try:
        deployment = client.read_deployment_by_name(f"stages/{pool}")
    except ObjectNotFound:
        return f"that pool has no deployment stages/{pool}"
    # Imports SQLAlchemy: 16 MB that a campaign on one host does not need.
    from prefect.utilities.schema_tools import validate
    from prefect.utilities.schema_tools.validation import ValidationError

    variables = {**deployment.job_variables, **job.job_variables}
    try:
        validate(variables, work_pool.base_job_template.get("variables", {}), raise_on_error=True, preprocess=False)
    except ValidationError as error:
        return f"that pool does not take its job_variables: {error}"
    has_workers = not (work_pool.is_push_pool or work_pool.is_managed_pool)
    if has_workers and all(w.status != WorkerStatus.ONLINE for w in client.read_workers_for_work_pool(pool)):
        return "no worker of that pool is online"
    return None
