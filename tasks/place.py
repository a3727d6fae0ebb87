"""Stages on another host: a task that has a work pool's worker run them, and watches over them from here.

    place_elsewhere ──run_deployment `stages/<pool>`──► worker ─► flow `stages` on its host
        │  ◄── its beacon in the run's store: at work │ ended │ failed, with a sentence
        │  ◄── its flow run's state: crashed, cancelled
        └── silent for too long: taken to be gone, and the task's retry has it run somewhere else

Draining is asked for by the controller's own beacon, so it needs no Prefect server.
"""

import contextlib
import contextvars
import threading
import time
from pathlib import PurePosixPath
from typing import Any

import httpx
from prefect import get_run_logger, task
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import FlowRun, State
from prefect.deployments import run_deployment
from prefect.exceptions import PrefectException
from prefect.runtime import task_run
from prefect.states import Cancelled

from millrace.background import Background
from millrace.errors import InputError, LedgerMismatch, StageDied
from millrace.hosts import SILENT_SECONDS, Watch
from millrace.places import Place
from millrace.stages.arguments import StageArguments
from storage.errors import Fenced
from storage.factory import open_store
from tasks.events import emit
from tasks.restarts import lives_of
from tasks.stop import STOP
from tasks.supervise import STAGE_TASK

_LOOK_SECONDS = 1.0
_STATE_SECONDS = 5.0
_TAKEN_SECONDS = 25.0
"""After which a job that no worker has taken is spoken of."""
_DRAIN_SECONDS = 60.0
_FINAL: dict[str, type[Exception]] = {kind.__name__: kind for kind in (InputError, Fenced, LedgerMismatch)}


@task(name="place", task_run_name="{place.name}@{place.work_pool}", **STAGE_TASK)
def place_elsewhere(arguments: StageArguments, place: Place) -> None:
    """Has the stages of `place` run by its work pool until they end or drain.

    Raises InputError, Fenced or LedgerMismatch with the other host's sentence, and StageDied after anything else.
    """
    lives = lives_of(str(task_run.id))
    if lives.restarts:
        payload = {"stage": place.name, "cause": lives.cause, "restarts": lives.restarts}
        emit("stage.restarted", arguments.run_url, payload)
    run = _run_deployment(
        f"stages/{place.work_pool}",
        parameters={
            "run_url": arguments.run_url,
            "attempt": arguments.attempt,
            "place": place.model_dump(mode="json"),
        },
        flow_run_name=f"{place.name} of {PurePosixPath(arguments.run_url).name}",
        job_variables=place.job_variables,
        timeout=0,
    )
    placed = Placed(arguments, place, str(run.id))
    try:
        with _Followed(run.id) as state:
            placed.attend(state)
    finally:
        lives.lived(placed.at_work_seconds, SILENT_SECONDS)


def _run_deployment(name: str, **arguments: Any) -> FlowRun:
    run = run_deployment(name, **arguments)
    # A coroutine only where there is an event loop, and here is none.
    assert isinstance(run, FlowRun)
    return run


class Placed:
    """One flow run `stages`, as seen from the controller."""

    def __init__(self, arguments: StageArguments, place: Place, flow_run_id: str) -> None:
        self._arguments = arguments
        self._place = place
        self._of = flow_run_id
        self._watch = Watch(open_store(arguments.run_url), place.sign_of_life, place.number)
        self._started = time.monotonic()
        self._taken: float | None = None
        self._said = False

    @property
    def at_work_seconds(self) -> float:
        """Since a host took it."""
        return 0.0 if self._taken is None else time.monotonic() - self._taken

    def attend(self, state: "_Followed") -> None:
        """Until it has ended. Raises as `place_elsewhere` does."""
        stopping: float | None = None
        while True:
            silent = self._watch.look()
            life = self._watch.life if self._watch.life.get("of") == self._of else {}
            if life.get("ended"):
                return self._judge(life)
            if life:
                self._taken = self._taken or time.monotonic()
                if silent > SILENT_SECONDS:
                    state.give_up()
                    raise StageDied(f"{self._where(life)} has been silent for {silent:.0f} s: taken to be gone")
            elif STOP.is_set():
                # Nobody has begun it.
                return state.give_up()
            else:
                self._speak_of_waiting()
            if state.final is not None:
                self._judge_silent(state.final, life)
            if STOP.is_set():
                stopping = stopping or time.monotonic()
                if time.monotonic() - stopping > _DRAIN_SECONDS:
                    state.give_up()
                    raise StageDied(f"{self._where(life)} has not drained after {_DRAIN_SECONDS:.0f} s")
            time.sleep(_LOOK_SECONDS)

    def _judge(self, life: dict[str, Any]) -> None:
        sentence = life.get("sentence")
        if sentence is None:
            return
        raise _FINAL.get(life.get("final") or "", StageDied)(sentence)

    def _judge_silent(self, final: State[Any], life: dict[str, Any]) -> None:
        """Of a flow run that ended, and whose host has not said so in the run's store."""
        if final.is_failed() and not life:
            # It has not even come to beat: the host can't serve the run, and its error says why.
            raise InputError(f"{self._where(life)}: {_error(final)}")
        raise StageDied(f"{self._where(life)}: its flow run has ended as {final.name}: {final.message}")

    def _where(self, life: dict[str, Any]) -> str:
        host = f" {life['doing']}" if life else ""
        return f"{self._place.name} of work pool {self._place.work_pool}{host}"

    def _speak_of_waiting(self) -> None:
        waited = time.monotonic() - self._started
        if waited > _TAKEN_SECONDS and not self._said:
            self._said = True
            sentence = f"no worker of work pool {self._place.work_pool} has taken {self._place.name} for {waited:.0f} s"
            get_run_logger().error(sentence)
            emit("placement.waiting", self._arguments.run_url, {"stage": self._place.name, "sentence": sentence})


def _error(final: State[Any]) -> str:
    """Of a flow run that failed, without Prefect's words and the name of its type."""
    _, _, error = (final.message or "").partition("encountered an exception: ")
    return error.partition(": ")[2] or final.message or final.name or "failed"


class _Followed(Background):
    """A flow run's state, asked for in a thread of its own: a server that is away holds up whoever asks."""

    def __init__(self, flow_run_id: Any) -> None:
        super().__init__(f"state of {flow_run_id}", join_seconds=0)
        self.final: State[Any] | None = None
        """Its final state, once it has one and the host has had time to say more."""
        self._id = flow_run_id

    def _run(self) -> None:
        while not self._over.wait(_STATE_SECONDS):
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                state = client.read_flow_run(self._id).state
                if state is not None and state.is_final():
                    # Its own words come by the store; they may be a beat behind.
                    self._over.wait(_STATE_SECONDS)
                    self.final = state
                    return

    def give_up(self) -> None:
        """No worker shall begin or go on with it, as far as the server can still say so."""
        # In a copy of this context, which says where the server is.
        threading.Thread(target=contextvars.copy_context().run, args=(self._cancel,), daemon=True).start()

    def _cancel(self) -> None:
        with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
            client.set_flow_run_state(self._id, Cancelled(message="given up by its campaign"), force=True)
