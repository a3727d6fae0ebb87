"""An attempt: the frame around it, and the stages that run side by side in it. Shared by campaigns, hosts and replays.

with attempt_under_way ─► progress/controller-0, every 2 s ─► attempts/<n>.ended: stopped, or failed with its cause
    └─ run_together: submit ×n ─► until a stage ends ─► STOP ─► all drained            killed ─► no record of the end
                                                          └─ interrupted once more ─► STOP_NOW ─► all killed
"""

import contextlib
import hashlib
import math
import queue
import shutil
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from prefect import get_run_logger
from prefect.exceptions import Pause
from prefect.futures import PrefectFuture

from millrace.errors import MillraceError
from millrace.forking.stages import STAGES
from millrace.runs.record import CONTROLLER, EndState, end_attempt
from millrace.runtime.arguments import StageArguments
from millrace.runtime.devices import Assignment, Process
from millrace.runtime.heartbeat import HeartbeatPublisher
from storage.errors import StorageError
from storage.stores.base import Store
from storage.stores.memory import memory_folder
from tasks.jobs import Job
from tasks.stages import STAGE_TASKS
from tasks.stop import STOP, STOP_NOW

_POLL_SECONDS = 0.5
StageTasks = Iterable[tuple[str, PrefectFuture[Any]]]
"""Submitted stage tasks by name, such as `train-0`."""


def handover_prefix(owner: str) -> str:
    """The common prefix of the folders of all attempts of `owner`."""
    return f"handover-{hashlib.sha256(owner.encode()).hexdigest()[:16]}-"


@contextlib.contextmanager
def handover_folder(owner: str, attempt: int) -> Iterator[Path]:
    """A folder in shared memory for the weights of one attempt of `owner`, such as a run's URL, during a `with` block.

    Removes the folders of earlier attempts, because a killed controller can't. Those of later attempts stay: the caller
    may be a controller that slept while its run was resumed.
    """
    prefix = handover_prefix(owner)
    for folder in memory_folder().glob(f"{prefix}*"):
        number = folder.name.removeprefix(prefix)
        if number.isdecimal() and int(number) <= attempt:
            shutil.rmtree(folder, ignore_errors=True)
    folder = memory_folder() / f"{prefix}{attempt}"
    folder.mkdir(mode=0o700)
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def attempt_under_way(store: Store, attempt: int, doing: str) -> Iterator[tuple[StageArguments, HeartbeatPublisher]]:
    """Publishes the controller's heartbeats; at the end stops the stages, removes their folder and records the end.

    Yields the arguments of its stages. Stages on other hosts drain when a heartbeat requests it, or when heartbeats
    stop. An end that is recorded already stays.
    """
    state: EndState = "stopped"
    cause = None
    try:
        with (
            handover_folder(store.url, attempt) as handover,
            HeartbeatPublisher(
                store, CONTROLLER, 0, owner_id=str(attempt), doing=doing, draining=STOP.is_set
            ) as heartbeats,
        ):
            try:
                yield StageArguments(run_url=store.url, attempt=attempt, replica=0, handover=handover), heartbeats
            finally:
                STOP.set()
                STAGES.close()
    # Ctrl-C, SIGTERM and Pause are each a BaseException: they stop the attempt.
    except Exception as error:
        # Further lines may quote a log.
        first_line = str(error).partition("\n")[0]
        expected = isinstance(error, MillraceError | StorageError)
        state, cause = "failed", first_line if expected else f"{type(error).__name__}: {first_line}"
        raise
    finally:
        end_attempt(store, attempt, state, cause)


def submit_stages(job: Job, arguments: StageArguments, assignment: Assignment) -> StageTasks:
    """Submits the tasks of a job's stages on this host, with their GPUs."""
    for process in job.processes:
        own_arguments = arguments_of((process.stage, process.replica), arguments, assignment)
        future = STAGE_TASKS[process.stage].submit(own_arguments, process.threads)
        yield f"{process.stage}-{process.replica}", future


def arguments_of(process: Process, arguments: StageArguments, assignment: Assignment) -> StageArguments:
    """The arguments of one process, out of those of all in the attempt."""
    return replace(arguments, replica=process[1], devices=assignment.get(process, ()))


def run_together(
    tasks: StageTasks,
    *,
    may_end_first: Collection[str] = (),
    ends_at: float = math.inf,
    stop_requested: Callable[[], object] = STOP.is_set,
) -> str | None:
    """Submits the stage tasks that `tasks` yields, waits until one ends that may not end first, and drains the others.

    Returns the name of that stage; None once a stop is requested, at `ends_at` (time.monotonic), or when all have
    ended. Raises the error of a stage that failed. Polls, so that a signal or a cancellation is delivered here.
    """
    started: dict[PrefectFuture[Any], str] = {}
    ended: queue.Queue[PrefectFuture[Any]] = queue.Queue()
    interrupted = True
    try:
        for name, future in tasks:
            started[future] = name
            future.add_done_callback(ended.put)
        running = set(started)
        first = None
        while first is None and running and time.monotonic() < ends_at and not stop_requested():
            with contextlib.suppress(queue.Empty):
                future = ended.get(timeout=_POLL_SECONDS)
                future.result()
                running.remove(future)
                first = None if started[future] in may_end_first else started[future]
        interrupted = False
        if first is None and running:
            reason = "budget.duration_minutes is spent" if time.monotonic() >= ends_at else "a stop was requested"
            get_run_logger().info("%s: the stages drain", reason)
        return first
    finally:
        STOP.set()
        _wait_until_drained(started)
        for future, name in started.items():
            if name == "train-0" and not interrupted:
                # If draining the trainer failed, the work since its last checkpoint is lost: raise its error.
                future.result()
            elif not future.state.is_completed():
                # The stage's commits count; the rest was never part of the run.
                get_run_logger().warning("a stage failed to drain: %s", future.state.message)
        get_run_logger().info("all stages ended")


def _wait_until_drained(futures: Collection[PrefectFuture[Any]]) -> None:
    try:
        for future in futures:
            # Once a person has suspended the flow run, Prefect raises Pause after each wait.
            with contextlib.suppress(Pause):
                future.wait()
    except BaseException:
        # Ctrl-C or SIGTERM once more: kill the stages without waiting for their work.
        STOP_NOW.set()
        for future in futures:
            with contextlib.suppress(Pause):
                future.wait()
        raise
