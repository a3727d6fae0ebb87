"""The campaign: the single controller of a run. It holds no data; stages meet at streams.

    prepare ─► bootstrap? ─► evaluate start ─┬─► generate ×G     ┐
                                             ├─► score ×S        │ long-running tasks, each supervising
                                             ├─► sync_weights    │ its own process
                                             └─► train           ┘
    control loop: waits for train, or until the time is up ─► STOP ─► the others drain
                                     ─► evaluate end ─► promote ─► summary.json ─► report

One call is one attempt. What its budget leaves undone is the next one's: a schedule that calls it every night with
`resume="latest"` is a campaign of weeks. Cancel, SIGTERM and Ctrl-C reach the control loop; on its way out it sets
STOP, and every stage drains.
"""

import contextlib
import math
import shutil
import time
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.client.schemas.objects import State
from prefect.states import Cancelled
from prefect.task_runners import ThreadPoolTaskRunner

from configs.schema import RunConfig
from flows.campaign_report import Outcome, write_report
from flows.cancellation import Cancellation
from flows.prepare import Resume, prepare
from flows.report import Reporter
from flows.running import Running
from flows.shown import show
from flows.summary import write_summary
from millrace.errors import MillraceError
from millrace.hosts import CONTROLLER, Beacon
from millrace.places import places
from millrace.run import end_attempt
from millrace.stages.arguments import StageArguments
from storage.checkpoints import read_latest
from storage.factory import open_store
from storage.failpoints import failpoint
from tasks.bootstrap import bootstrap
from tasks.evaluate import evaluate
from tasks.long_running import LONG_RUNNING
from tasks.place import place_elsewhere
from tasks.promote import promote
from tasks.stop import STOP


def _flow_run_name() -> str:
    parameters = runtime.flow_run.parameters
    config = parameters["config"]
    return str(parameters.get("run_id") or (config.name if isinstance(config, RunConfig) else config["name"]))


@flow(
    name="campaign",
    flow_run_name=_flow_run_name,
    # Room for the most replicas a config may ask for, and for evaluation.
    task_runner=ThreadPoolTaskRunner(max_workers=160),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def campaign(
    config: RunConfig, run_id: str | None = None, resume: Resume = "never"
) -> dict[str, Any] | State[dict[str, Any]]:
    """Asynchronous RL post-training as `config` describes it: one attempt. Returns what summary.json holds.

    Where a person cancels it in the Prefect UI, it drains and returns the state Cancelled.

    Args:
        config: Everything a person decides about the run.
        run_id: The run's folder under storage.root; null: the config's name.
        resume: never: the run must not exist yet. required: it must, and goes on from its latest checkpoint. latest: it
            goes on where it exists, and starts where it does not.

    Raises InputError for a person's mistake before anything has run, and StageDied if a stage can't be kept alive.
    """
    STOP.clear()
    minutes = config.budget.duration_minutes
    ends_at = math.inf if minutes is None else time.monotonic() + 60 * minutes
    run = prepare(config, run_id or config.name, resume=resume)
    arguments = StageArguments(run_url=run.run_url, attempt=run.attempt, replica=0, handover=run.handover)
    try:
        with Reporter(run.run_url), Cancellation() as cancellation:
            failpoint("controller.prepared")
            if config.model.path is None:
                bootstrap(arguments, config.model.bootstrap.threads)
            failpoint("controller.bootstrapped")
            evaluate(arguments, config.training.threads, "start")
            _run_stages(config, arguments, ends_at, cancellation)
            if cancellation.asked():
                return Cancelled(message="its stages have drained, and the run can be gone on with")
            failpoint("controller.trained")
            # Where the time was up before the trainer had begun there is nothing new to measure.
            if read_latest(open_store(run.run_url)) is not None:
                evaluate(arguments, config.training.threads, "end")
                promote(arguments, config.training.threads)
            failpoint("controller.evaluated")
        summary = write_summary(run.run_url, run.attempt)
        failpoint("controller.summarised")
        outcome: Outcome = "finished" if summary["state"] == "finished" else "window over"
        report = write_report(run.run_url, run.attempt, outcome)
        show(report, key="campaign-report", description="What this attempt came to")
        return summary
    finally:
        STOP.set()
        shutil.rmtree(run.handover, ignore_errors=True)
        # Where it was finished, that is recorded already, and stays.
        end_attempt(open_store(run.run_url), run.attempt, "stopped")


def _run_stages(config: RunConfig, arguments: StageArguments, ends_at: float, cancellation: Cancellation) -> None:
    """Runs the four stages until the trainer is done, a person cancels, or time.monotonic says `ends_at`."""
    with contextlib.ExitStack() as stack:
        if any(place.work_pool for place in places(config)):
            # Those elsewhere drain when it says so, or falls silent.
            store, of = open_store(arguments.run_url), str(arguments.attempt)
            stack.enter_context(Beacon(store, CONTROLLER, 0, of=of, doing="campaign", draining=STOP.is_set))
        running = stack.enter_context(Running())
        for place in places(config):
            if place.work_pool is not None:
                running.start(place.seats[0].stage, place_elsewhere.submit(arguments, place))
                continue
            for seat in place.seats:
                started = LONG_RUNNING[seat.stage].submit(replace(arguments, replica=seat.replica), seat.threads)
                running.start(seat.stage, started)
        failpoint("controller.started")
        ended = running.first_to_end(ends_at, cancellation.asked)
        if ended is None:
            why = "the campaign is cancelled" if cancellation.asked() else "budget.duration_minutes is spent"
            get_run_logger().info("%s: the stages drain", why)
        elif ended != "train":
            raise MillraceError(f"{ended} ended before the trainer did")
    STOP.clear()
