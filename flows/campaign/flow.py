"""The campaign: the single controller of a run. It holds no data; stages exchange it through streams.

    prepare ─► bootstrap? ─┬─► generate ×G     ┐
                           ├─► score ×S        │ long-running tasks, each supervising
                           ├─► sync_weights    │ its own process
                           ├─► train           │
                           └─► evaluate        ┘
    control loop: waits for train, or until the time is up ─► STOP ─► the others drain
                                     ─► evaluate at the end ─► promote ─► summary.json ─► report

One call is one attempt. What its budget leaves undone, the next attempt continues: a schedule that calls the flow every
night with `resume="latest"` is a campaign of weeks. Cancel, Suspend, SIGTERM and Ctrl-C reach the control loop; on its
way out it sets STOP, and every stage drains.
"""

import math
import time
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.exceptions import Pause
from prefect.states import Cancelled, Completed
from prefect.task_runners import ThreadPoolTaskRunner

from configs.recipe import THREADS as BOOTSTRAP_THREADS
from configs.schema import RunConfig
from flows.campaign.attempt import attempt_under_way
from flows.campaign.cancellation import Cancellation, num_suspensions, wait_for_former
from flows.campaign.hub import with_local_copies
from flows.campaign.prepare import Resume, check, prepare, run_store
from flows.campaign.report import Outcome, write_report, write_summary
from flows.campaign.stage_group import StageGroup
from flows.display.artifacts import artifact_key, final_message, flow_run_link, promoted_card, show
from flows.display.ui_reporter import UiReporter
from millrace.errors import MillraceError
from millrace.evaluation.promotion import read_decision
from millrace.runs.record import read_attempt
from millrace.runtime.arguments import EVALUATE_AT_END, StageArguments
from storage.checkpoints import read_latest
from storage.failpoints import failpoint
from storage.stores.factory import open_store
from tasks.jobs import evaluation_job, jobs, stages_here
from tasks.remote_stage import run_remotely
from tasks.stages import LONG_RUNNING, bootstrap, evaluate, promote
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
    "validate_parameters": True,
}
"""Of every flow that runs a campaign."""


@flow(**OPTIONS)
def campaign(
    config: RunConfig, run_id: str | None = None, resume: Resume = "never", accept_changed_inputs: bool = False
) -> dict[str, Any] | State[dict[str, Any]]:
    """Asynchronous RL post-training as `config` describes it: one attempt. Its result is the content of summary.json.

    If a person cancels it in the Prefect UI, it drains and returns the state Cancelled. If a person suspends it, it
    drains and its process ends; once resumed, the same flow run continues the run.

    Args:
        config: Everything a person decides about the run.
        run_id: The run's folder under storage.root; null: the config's name.
        resume: never: the run must not exist yet. required: it must, and continues from its latest checkpoint. latest:
            it continues if it exists, and starts otherwise.
        accept_changed_inputs: Whether a run is continued although its prompts, rewards or another input hold something
            else than before. The change is recorded.

    Raises InputError for a user error before anything has run, and StageDied if a stage can't be kept alive.
    """
    run_id = run_id or config.name
    former = num_suspensions()
    if former and resume == "never":
        # The run that exists is this flow run's own.
        resume = "latest"
    config = with_local_copies(config, run_store(config, run_id), get_run_logger().info)
    checked = check(config, run_id, resume=resume, accept_changed_inputs=accept_changed_inputs)
    if former:
        wait_for_former(checked.store, config.supervision.drain_seconds)
    return _attempt(config, run_id, resume, checked.inputs, former)


@flow(**OPTIONS)
def checked_campaign(
    config: RunConfig, run_id: str, resume: Resume, inputs: dict[str, str]
) -> dict[str, Any] | State[dict[str, Any]]:
    """The same flow for `millrace run`, which makes the checks itself before it starts a Prefect server."""
    return _attempt(config, run_id, resume, inputs)


def _attempt(
    config: RunConfig, run_id: str, resume: Resume, inputs: dict[str, str], former: int = 0
) -> dict[str, Any] | State[dict[str, Any]]:
    """One attempt whose config and inputs were checked. `former`: how often the flow run was suspended before."""
    STOP.clear()
    STOP_NOW.clear()
    warm_up(stages_here(config))
    minutes = config.budget.duration_minutes
    ends_at = math.inf if minutes is None else time.monotonic() + 60 * minutes
    run = prepare(config, run_id, resume=resume, inputs=inputs, flow_run=flow_run_link())
    arguments = StageArguments(run_url=run.run_url, attempt=run.attempt, replica=0, handover=run.handover)
    store = open_store(run.run_url)
    attempt = read_attempt(store, run.attempt)
    for change in attempt.changes:
        get_run_logger().info("attempt %s: %s", run.attempt, change)
    with attempt_under_way(store, run.attempt, run.handover, "campaign") as heartbeats:
        with UiReporter(run.run_url), Cancellation(former) as cancellation:
            failpoint("controller.prepared")
            if config.model.path is None:
                bootstrap(arguments, BOOTSTRAP_THREADS)
            failpoint("controller.bootstrapped")
            # A finished run submitted again has nothing to train; its last evaluation may still be missing.
            if attempt.first_step < config.training.max_steps:
                _run_stages(config, arguments, ends_at, cancellation)
                # Stages of other hosts would take the last heartbeat for a request to drain.
                heartbeats.publish()
            if cancellation.suspended is not None:
                # Prefect's way to end the process and leave the state as it is.
                raise Pause(state=cancellation.suspended)
            if cancellation.asked():
                return Cancelled(message="its stages have drained; the run can be resumed")
            failpoint("controller.trained")
            # If the time was up before the trainer began, there is nothing new to measure.
            if read_latest(store) is not None:
                _evaluate_at_end(config, arguments)
                promote(arguments, config.training.threads)
            failpoint("controller.evaluated")
        summary = write_summary(store, run.attempt)
        failpoint("controller.summarised")
        outcome: Outcome = "finished" if summary["state"] == "finished" else "window over"
        report = write_report(store, run.attempt, outcome)
        show(report, key=artifact_key(run_id, "report"), description="The result of this attempt")
        decision = read_decision(store, run.attempt)
        if decision is not None and decision.promoted:
            card = promoted_card(run.run_url, run_id, decision)
            show(card, key=artifact_key(run_id, "promoted"), description=decision.headline)
        return Completed(message=final_message(decision, summary), data=summary)


def _run_stages(config: RunConfig, arguments: StageArguments, ends_at: float, cancellation: Cancellation) -> None:
    """Runs the long-running stages until the trainer is done, a person cancels, or it is `ends_at` (time.monotonic)."""
    all_jobs = jobs(config)
    with StageGroup() as group:
        for job in all_jobs:
            if job.work_pool is not None:
                group.add(job.name, run_remotely.submit(arguments, job))
                continue
            for process in job.processes:
                future = LONG_RUNNING[process.stage].submit(
                    replace(arguments, replica=process.replica), process.threads
                )
                group.add(f"{process.stage}-{process.replica}", future)
        failpoint("controller.started")
        # Without `evaluation.every` the evaluation ends after the base model.
        may_end_first = {job.name for job in all_jobs if job.may_end_first}
        while (ended := group.wait_for_first(ends_at, cancellation.asked)) in may_end_first:
            continue
        if ended is None:
            get_run_logger().info("%s: the stages drain", _why_it_ends(cancellation))
        elif ended != "train-0":
            raise MillraceError(f"{ended} ended before the trainer did")
    STOP.clear()


def _why_it_ends(cancellation: Cancellation) -> str:
    if cancellation.suspended is not None:
        return "the campaign is suspended"
    return "the campaign is cancelled" if cancellation.asked() else "budget.duration_minutes is spent"


def _evaluate_at_end(config: RunConfig, arguments: StageArguments) -> None:
    """Measures the latest checkpoint, and the base model if there was no time for it."""
    job = evaluation_job(config, EVALUATE_AT_END)
    if job.work_pool is None:
        evaluate(replace(arguments, replica=EVALUATE_AT_END), config.training.threads)
    else:
        run_remotely(arguments, job)
