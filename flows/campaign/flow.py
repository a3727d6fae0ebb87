"""The campaign: the single controller of a run. It holds no data; stages exchange it through streams.

    check ─► bootstrap? ─┬─► generate ×G     ┐
                         ├─► score ×S        │ long-running tasks, each supervising
                         ├─► sync_weights    │ its own process
                         ├─► train           │
                         └─► evaluate        ┘
    control loop: waits for train, or until the time is up ─► STOP ─► the others drain
                                     ─► evaluate at the end ─► promote ─► summary.json ─► report

One call is one attempt. The next attempt continues the work that its budget leaves undone: a schedule that calls the
flow every night with `resume="latest"` is a campaign of weeks. Cancel, Suspend, SIGTERM and Ctrl-C reach the control
loop, which polls the flow run's states; on its way out it sets STOP, and every stage drains.
"""

import math
import time
from collections.abc import Callable, Sequence
from pathlib import PurePosixPath
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner

from configs.recipe import THREADS as BOOTSTRAP_THREADS
from configs.schema import RunConfig
from flows.campaign.attempt import StageTasks, attempt_under_way, run_together, submit_stages
from flows.campaign.local_copies import with_local_copies
from flows.campaign.mirror import mirrored
from flows.campaign.prepare import Resume, check, check_run, claim, run_store
from flows.campaign.remote_stages import run_remotely
from flows.campaign.report import write_report, write_summary
from flows.campaign.threads import with_threads
from flows.campaign.user_errors import fails_with_one_line
from flows.display.artifacts import artifact_key, final_message, flow_run_link, show
from flows.display.ui_reporter import UiReporter
from millrace.errors import MillraceError
from millrace.evaluation.promotion import read_decision
from millrace.runs.record import Attempt
from millrace.runtime.arguments import EVALUATE_BESIDE, StageArguments
from millrace.runtime.devices import Assignment
from millrace.runtime.heartbeat import HeartbeatPublisher
from storage.checkpoints import read_latest
from storage.failpoints import failpoint
from storage.stores.base import Store
from tasks.device_leases import leased_devices
from tasks.events import FlowRunStates, read_states
from tasks.jobs import Job, jobs, jobs_at_end, processes_here, stages_here
from tasks.stages import bootstrap
from tasks.start import warm_up
from tasks.stop import STOP, STOP_NOW


def _flow_run_name() -> str:
    parameters = runtime.flow_run.parameters
    config = parameters["config"]
    return str(parameters.get("run_id") or (config.name if isinstance(config, RunConfig) else config["name"]))


OPTIONS: dict[str, Any] = {
    "name": "campaign",
    "flow_run_name": _flow_run_name,
    # Room for the most replicas and hosts that a config may ask for, and for evaluation.
    "task_runner": ThreadPoolTaskRunner(max_workers=288),
    "persist_result": False,
}
"""Options of each flow that runs a campaign."""


@flow(**OPTIONS)
@fails_with_one_line
def campaign(
    config: RunConfig, run_id: str | None = None, resume: Resume = "never", accept_changed_inputs: bool = False
) -> dict[str, Any] | State[dict[str, Any]]:
    """Asynchronous RL post-training as `config` describes it: one attempt. Returns the content of summary.json.

    If a person cancels it in the Prefect UI, it drains and returns the state Cancelled. If a person suspends it, it
    drains and its process ends; once resumed, the same flow run continues the run.

    Args:
        config: Everything a person decides about the run.
        run_id: The run's folder under storage.root; null: the config's name.
        resume: never: the run must not exist yet. required: it must, and continues from its latest checkpoint. latest:
            it continues if it exists, and starts otherwise.
        accept_changed_inputs: Whether a run continues although the content of its prompts, rewards or another input has
            changed. The change is recorded.

    Raises InputError for a user error before anything has run, and StageDied if a stage can't be kept alive.
    """
    run_id = run_id or config.name
    # Prefect suspends only flow runs of a deployment.
    suspended_before = len(suspensions(read_states(runtime.flow_run.id))) if runtime.deployment.id else 0
    if suspended_before and resume == "never":
        # The existing run belongs to this flow run.
        resume = "latest"
    check_run(run_store(config, run_id), run_id, resume)
    config = with_local_copies(config, run_store(config, run_id), get_run_logger().info)
    inputs = check(config, run_id, resume=resume, accept_changed_inputs=accept_changed_inputs)
    config = with_threads(config, run_store(config, run_id))
    return run_attempt.fn(config, run_id, resume, inputs, suspended_before)


@flow(**OPTIONS)
def run_attempt(
    config: RunConfig,
    run_id: str,
    resume: Resume,
    inputs: dict[str, str],
    suspended_before: int = 0,
    command: str | None = None,
) -> dict[str, Any] | State[dict[str, Any]]:
    """Runs one attempt whose config and inputs `check` has accepted, as `campaign` does after its checks.

    `millrace run` makes the checks before it waits for a Prefect server. `suspended_before`: how often the flow run was
    suspended before this process began. `command`: the command line that continues the run.
    """
    STOP.clear()
    STOP_NOW.clear()
    warm_up(stages_here(config))
    minutes = config.budget.duration_minutes
    ends_at = math.inf if minutes is None else time.monotonic() + 60 * minutes
    # Before the run is claimed: others may have taken GPUs since the check.
    with leased_devices(config, processes_here(config), run_store(config, run_id).url) as assignment:
        store, attempt = claim(config, run_id, resume=resume, inputs=inputs, flow_run=flow_run_link(), command=command)
        for change in attempt.changes:
            get_run_logger().info("attempt %s: %s", attempt.number, change)
        return _run_claimed(config, store, attempt, assignment, ends_at, suspended_before)


def _run_claimed(
    config: RunConfig, store: Store, attempt: Attempt, assignment: Assignment, ends_at: float, suspended_before: int
) -> dict[str, Any] | State[dict[str, Any]]:
    """Runs the stages of an attempt, from the start model to the report."""
    with (
        mirrored(config.mirror, store),
        attempt_under_way(store, attempt.number, "campaign") as (arguments, heartbeats),
    ):
        with UiReporter(store.url), FlowRunStates(runtime.flow_run.id) as flow_run:

            def stop() -> State | None:
                return stop_request(flow_run.states, suspended_before)

            failpoint("controller.prepared")
            if config.model.path is None:
                bootstrap(arguments, BOOTSTRAP_THREADS)
            failpoint("controller.bootstrapped")
            # A finished run submitted again has nothing to train; its last evaluation may still be missing.
            if attempt.first_step < config.training.max_steps:
                _train(config, arguments, assignment, ends_at, stop)
                # Stages of other hosts would take the last heartbeat for a request to drain.
                heartbeats.publish()
            failpoint("controller.trained")
            # If the time was up before the trainer began, there is nothing new to measure.
            if read_latest(store) is not None:
                _measure(config, arguments, assignment, heartbeats, stop)
            if (request := stop()) is not None:
                if request.is_paused():
                    # Prefect's way to end the process and keep the state.
                    raise Pause(state=request)
                return Cancelled(message="its stages have drained; the run can be resumed")
            failpoint("controller.evaluated")
        summary = write_summary(store, attempt.number)
        failpoint("controller.summarised")
        report = write_report(store, summary)
        description = f"Read this first. Attempt {attempt.number}: {summary['state']}"
        show(report, key=artifact_key(PurePosixPath(store.url).name, "report"), description=description)
        decision = read_decision(store, attempt.number)
        return Completed(message=final_message(decision, summary), data=summary)


def _train(
    config: RunConfig,
    arguments: StageArguments,
    assignment: Assignment,
    ends_at: float,
    stop: Callable[[], State | None],
) -> None:
    """Runs the long-running stages until the trainer is done, a person stops the campaign, or it is `ends_at`."""
    all_jobs = jobs(config)

    def submit() -> StageTasks:
        for job in all_jobs:
            yield from _submit(job, arguments, assignment)
        failpoint("controller.started")

    # Without `evaluation.every` the evaluation ends after the base model.
    may_end_first = {job.name for job in all_jobs if job.may_end_first}
    ended = run_together(submit(), may_end_first=may_end_first, ends_at=ends_at, stop_requested=stop)
    if ended not in (None, "train-0"):
        raise MillraceError(f"{ended} ended before the trainer did")
    STOP.clear()


def _measure(
    config: RunConfig,
    arguments: StageArguments,
    assignment: Assignment,
    heartbeats: HeartbeatPublisher,
    stop: Callable[[], State | None],
) -> None:
    """Evaluates the latest checkpoint and decides on its promotion, unless a person stops the campaign meanwhile."""
    for job in jobs_at_end(config):
        if stop() is not None:
            return
        (process,) = job.processes
        # The evaluation during training has ended.
        devices = assignment.get((process.stage, EVALUATE_BESIDE), ())
        run_together(_submit(job, arguments, {(process.stage, process.replica): devices}), stop_requested=stop)
        STOP.clear()
        heartbeats.publish()


def _submit(job: Job, arguments: StageArguments, assignment: Assignment) -> StageTasks:
    """Submits the tasks of a job's stages on this host, or the one that has its work pool run them."""
    if job.work_pool is None:
        yield from submit_stages(job, arguments, assignment)
    else:
        yield job.name, run_remotely.submit(arguments, job)


def stop_request(states: Sequence[State], suspended_before: int) -> State | None:
    """The state by which a person has cancelled or suspended the flow run, though it may be resumed by now."""
    if states and (states[-1].is_cancelling() or states[-1].is_cancelled()):
        return states[-1]
    new = suspensions(states)[suspended_before:]
    return new[-1] if new else None


def suspensions(states: Sequence[State]) -> list[State]:
    """The states in which a flow run's process should end. A pause without rescheduling waits inside the process."""
    return [state for state in states if state.is_paused() and state.state_details.pause_reschedule]
