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

import math
import queue
import shutil
import time
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger, runtime
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from configs.schema import RunConfig
from flows.prepare import Resume, prepare
from flows.report import Reporter
from flows.summary import write_summary
from millrace.errors import MillraceError
from millrace.run import end_attempt
from millrace.stages.arguments import StageArguments
from storage.checkpoints import read_latest
from storage.factory import open_store
from storage.failpoints import failpoint
from tasks.bootstrap import bootstrap
from tasks.evaluate import evaluate
from tasks.generate import generate
from tasks.score import score
from tasks.stop import STOP
from tasks.sync_weights import sync_weights
from tasks.train import train

_LOOK_SECONDS = 0.5


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
def campaign(config: RunConfig, run_id: str | None = None, resume: Resume = "never") -> dict[str, Any]:
    """Asynchronous RL post-training as `config` describes it: one attempt. Returns what summary.json holds.

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
        with Reporter(run.run_url):
            failpoint("controller.prepared")
            if config.model.path is None:
                bootstrap(arguments, config.model.bootstrap.threads)
            failpoint("controller.bootstrapped")
            evaluate(arguments, config.training.threads, "start")
            _run_stages(config, arguments, ends_at)
            failpoint("controller.trained")
            # Where the time was up before the trainer had begun there is nothing new to measure.
            if read_latest(open_store(run.run_url)) is not None:
                evaluate(arguments, config.training.threads, "end")
            failpoint("controller.evaluated")
        summary = write_summary(run.run_url, run.attempt)
        failpoint("controller.summarised")
        return summary
    finally:
        STOP.set()
        shutil.rmtree(run.handover, ignore_errors=True)
        # Where it was finished, that is recorded already, and stays.
        end_attempt(open_store(run.run_url), run.attempt, "stopped")


def _run_stages(config: RunConfig, arguments: StageArguments, ends_at: float) -> None:
    """Runs the four stages until the trainer is done, or until `ends_at` on the clock of time.monotonic.

    Whatever happens, none is left behind.
    """
    ended: queue.Queue[tuple[str, PrefectFuture[None]]] = queue.Queue()
    futures: list[PrefectFuture[None]] = []

    def start(name: str, future: PrefectFuture[None]) -> None:
        futures.append(future)
        future.add_done_callback(lambda done: ended.put((name, done)))

    try:
        start("train", train.submit(arguments, config.training.threads))
        start("sync_weights", sync_weights.submit(arguments, 1))
        for replica in range(config.generation.replicas):
            start("generate", generate.submit(replace(arguments, replica=replica), config.generation.threads))
        for replica in range(config.scoring.replicas):
            start("score", score.submit(replace(arguments, replica=replica), config.scoring.threads))
        failpoint("controller.started")
        first = _first_to_end(ended, ends_at)
        if first is None:
            get_run_logger().info("budget.duration_minutes is spent: the stages drain")
        elif first[0] != "train" and first[1].state.is_completed():
            raise MillraceError(f"{first[0]} ended before the trainer did")
        else:
            first[1].result()
    finally:
        STOP.set()
        for future in futures:
            future.wait()
    for future in futures:
        if not future.state.is_completed():
            # What it had committed counts; what it had not was never part of the run.
            get_run_logger().warning("a stage did not drain by itself: %s", future.state.message)
    # Draining it may have failed, and then what it had done since its last checkpoint is lost.
    futures[0].result()
    get_run_logger().info("all stages ended")
    STOP.clear()


def _first_to_end(
    ended: queue.Queue[tuple[str, PrefectFuture[None]]], ends_at: float
) -> tuple[str, PrefectFuture[None]] | None:
    """None when the time is up. Waits in short steps, so that a signal or a cancellation is delivered here."""
    while time.monotonic() < ends_at:
        try:
            return ended.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            continue
    return None
