"""Stages on another host: a task that has a work pool's worker run them, and monitors them from here.

    run_remotely ──run_deployment `stages/<pool>`──► worker ─► flow `stages` on its host
        │  ◄── heartbeats in the run's store: at work │ ended │ failed, with a sentence
        │  ◄── state of its flow run: crashed, cancelled
        └── silent for too long: counts as lost, and the task's retry runs it somewhere else

The remote host learns from the controller's heartbeats when to drain, which needs no Prefect server.
"""

import contextlib
import contextvars
import threading
import time
from pathlib import PurePosixPath
from typing import Any

import httpx
from prefect import Task, get_run_logger, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State, TaskRun
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.runtime import task_run
from prefect.states import Cancelled

from configs.schema import RunConfig
from millrace.errors import InputError, LedgerMismatch, PlaceYielded, StageDied
from millrace.runs.record import read_attempt
from millrace.runtime.arguments import StageArguments
from millrace.runtime.background import Background
from millrace.runtime.heartbeat import SILENT_SECONDS, HeartbeatMonitor
from storage.errors import Fenced
from storage.stores.factory import open_store
from tasks.events import emit
from tasks.jobs import Job
from tasks.restart_budget import keep_going, restart_budget_of
from tasks.stages import STAGE_TASK
from tasks.stop import STOP, STOP_NOW

_POLL_SECONDS = 1.0
_STATE_SECONDS = 5.0
_ACCEPT_SECONDS = 25.0
"""After this time, a job that no worker has accepted is reported."""
_REPORT_SECONDS = 40.0
"""For a host to report that its stages have drained."""
FINAL_ERRORS = (InputError, Fenced, LedgerMismatch, PlaceYielded)
"""Errors after which the host does not start the stage again."""


def place_again(task: Task[Any, Any], task_run: TaskRun, state: State[Any]) -> bool:
    """As `keep_going`, but a place that was given back to the pool is asked for again, behind the other jobs."""
    if isinstance(state.result(raise_on_failure=False), PlaceYielded):
        return not STOP.is_set()
    return keep_going(task, task_run, state)


@task(
    name="place",
    task_run_name="{job.name}@{job.work_pool}",
    **STAGE_TASK | {"retry_condition_fn": place_again},
)
def run_remotely(arguments: StageArguments, job: Job) -> None:
    """Has the work pool of `job` run its stages until they end or drain.

    Raises InputError, Fenced, LedgerMismatch or PlaceYielded with the other host's sentence, and StageDied after
    anything else.
    """
    budget = restart_budget_of(str(task_run.id))
    if budget.restarts:
        payload = {"stage": job.name, "cause": budget.cause, "restarts": budget.restarts}
        emit("stage.restarted", arguments.run_url, payload)
    flow_run = run_deployment(
        f"stages/{job.work_pool}",
        parameters={"run_url": arguments.run_url, "attempt": arguments.attempt, "job": job.model_dump(mode="json")},
        flow_run_name=f"{job.name} of {PurePosixPath(arguments.run_url).name}",
        job_variables=job.job_variables,
        timeout=0,
    )
    # A coroutine only inside an event loop, and there is none here.
    assert isinstance(flow_run, FlowRun)
    config = RunConfig.model_validate(read_attempt(open_store(arguments.run_url), arguments.attempt).config)
    remote = RemoteStage(arguments, job, str(flow_run.id), drain_seconds=config.supervision.drain_seconds)
    try:
        with _FlowRunState(flow_run.id) as state:
            remote.monitor(state)
    finally:
        budget.add_work(remote.at_work_seconds, SILENT_SECONDS)


class RemoteStage:
    """One flow run `stages`, as seen from the controller."""

    def __init__(self, arguments: StageArguments, job: Job, flow_run_id: str, *, drain_seconds: float) -> None:
        self._arguments = arguments
        self._drain_seconds = drain_seconds
        self._job = job
        self._flow_run_id = flow_run_id
        self._heartbeats = HeartbeatMonitor(open_store(arguments.run_url), job.status_record, job.number)
        self._started = time.monotonic()
        self._accepted: float | None = None
        self._waiting_reported = False

    @property
    def at_work_seconds(self) -> float:
        """Time since a host accepted the job."""
        return 0.0 if self._accepted is None else time.monotonic() - self._accepted

    def monitor(self, state: "_FlowRunState") -> None:
        """Waits until the job has ended. Raises as `run_remotely` does."""
        stopping: float | None = None
        while True:
            silent_seconds = self._heartbeats.look()
            # A status record of an earlier flow run says nothing about this one.
            status = self._heartbeats.status if self._heartbeats.owner_id == self._flow_run_id else {}
            if status.get("ended"):
                return _raise_error_of(status)
            if status:
                self._accepted = self._accepted or time.monotonic()
                if silent_seconds > SILENT_SECONDS:
                    state.give_up()
                    raise StageDied(
                        f"{self._where(status)} has been silent for {silent_seconds:.0f} s: it counts as lost"
                    )
            elif STOP.is_set():
                # No host has started it.
                return state.give_up()
            else:
                self._report_waiting()
            if state.final is not None:
                self._check_flow_run(state.final, status)
            if STOP.is_set():
                stopping = stopping or time.monotonic()
                seconds = time.monotonic() - stopping
                if STOP_NOW.is_set() or seconds > self._drain_seconds + _REPORT_SECONDS:
                    state.give_up()
                    raise StageDied(f"{self._where(status)} has not drained after {seconds:.0f} s")
            time.sleep(_POLL_SECONDS)

    def _check_flow_run(self, final: State[Any], status: dict[str, Any]) -> None:
        """Raises the error of a flow run that ended although its host has not reported so in the run's store."""
        if final.is_failed() and not status:
            # It failed before its first heartbeat: the host can't serve the run, and its error says why.
            raise InputError(f"{self._where(status)}: {_error(final)}")
        raise StageDied(f"{self._where(status)}: its flow run has ended as {final.name}: {final.message}")

    def _where(self, status: dict[str, Any]) -> str:
        host = f" {status['doing']}" if status else ""
        return f"{self._job.name} of work pool {self._job.work_pool}{host}"

    def _report_waiting(self) -> None:
        waited = time.monotonic() - self._started
        if waited > _ACCEPT_SECONDS and not self._waiting_reported:
            self._waiting_reported = True
            sentence = f"no worker of work pool {self._job.work_pool} has taken {self._job.name} for {waited:.0f} s"
            get_run_logger().error(sentence)
            emit("placement.waiting", self._arguments.run_url, {"stage": self._job.name, "sentence": sentence})


def _raise_error_of(status: dict[str, Any]) -> None:
    """Raises the error that ended the job on its host, if any."""
    if status.get("sentence") is not None:
        final = {kind.__name__: kind for kind in FINAL_ERRORS}
        raise final.get(status.get("final") or "", StageDied)(status["sentence"])


def _error(final: State[Any]) -> str:
    """The error of a failed flow run, without Prefect's introduction and the error's type."""
    _, _, error = (final.message or "").partition("encountered an exception: ")
    return error.partition(": ")[2] or final.message or final.name or "failed"


class _FlowRunState(Background):
    """A flow run's state, polled in a thread of its own, because a server that is away blocks the request."""

    def __init__(self, flow_run_id: Any) -> None:
        super().__init__(f"state of {flow_run_id}", join_seconds=0)
        self.final: State[Any] | None = None
        """Its final state, set once the host has also had time to report its end."""
        self._id = flow_run_id

    def _run(self) -> None:
        while not self._over.wait(_STATE_SECONDS):
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                state = client.read_flow_run(self._id).state
                if state is not None and state.is_final():
                    # The host's report comes through the store, and may be a heartbeat late.
                    self._over.wait(_STATE_SECONDS)
                    self.final = state
                    return

    def give_up(self) -> None:
        """Keeps workers from starting or continuing it, if the server can be reached."""
        # In a copy of this context, which knows the server's address.
        threading.Thread(target=contextvars.copy_context().run, args=(self._cancel,), daemon=True).start()

    def _cancel(self) -> None:
        with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
            client.set_flow_run_state(self._id, Cancelled(message="given up by its campaign"), force=True)
