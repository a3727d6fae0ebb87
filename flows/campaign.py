"""The campaign: the single controller of a run. It holds no data; stages meet at streams.

    prepare ─► bootstrap? ─► evaluate start ─┬─► generate ×G     ┐
                                             ├─► score ×S        │ long-running tasks, each supervising
                                             ├─► sync_weights    │ its own process
                                             └─► train           ┘
                  control loop: waits for train ─► STOP ─► the others drain ─► evaluate end ─► summary.json

Cancel, SIGTERM and Ctrl-C reach the control loop; on its way out it sets STOP, and every stage drains.
"""

import queue
import shutil
from dataclasses import replace
from typing import Any

from prefect import flow, get_run_logger
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from configs.schema import RunConfig
from flows.prepare import prepare
from flows.report import Reporter
from flows.summary import write_summary
from millrace.errors import MillraceError
from millrace.run import end_attempt
from millrace.stages.arguments import StageArguments
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


@flow(
    name="campaign",
    flow_run_name="{run_id}",
    # Room for the most replicas a config may ask for, and for evaluation.
    task_runner=ThreadPoolTaskRunner(max_workers=160),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def campaign(config: RunConfig, run_id: str, resume: bool = False) -> dict[str, Any]:
    """Asynchronous RL post-training as `config` describes it. Returns what summary.json holds.

    `run_id` names the run's folder under `storage.root`; `resume` goes on with a run that is there.
    Raises InputError for a person's mistake before anything has run, and StageDied if a stage can't be kept alive.
    """
    STOP.clear()
    run = prepare(config, run_id, resume=resume)
    arguments = StageArguments(run_url=run.run_url, attempt=run.attempt, replica=0, handover=run.handover)
    try:
        with Reporter(run.run_url):
            failpoint("controller.prepared")
            if config.model.path is None:
                bootstrap(arguments, config.model.bootstrap.threads)
            failpoint("controller.bootstrapped")
            evaluate(arguments, config.training.threads, "start")
            _run_stages(config, arguments)
            failpoint("controller.trained")
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


def _run_stages(config: RunConfig, arguments: StageArguments) -> None:
    """Runs the four stages until the trainer is done; whatever happens, none is left behind."""
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
        name, future = _first_to_end(ended)
        if name != "train" and future.state.is_completed():
            raise MillraceError(f"{name} ended before the trainer did")
        future.result()
    finally:
        STOP.set()
        for future in futures:
            future.wait()
    for future in futures:
        if not future.state.is_completed():
            # What it had committed counts; what it had not was never part of the run.
            get_run_logger().warning("a stage did not drain by itself: %s", future.state.message)
    get_run_logger().info("all stages ended")
    STOP.clear()


def _first_to_end(ended: queue.Queue[tuple[str, PrefectFuture[None]]]) -> tuple[str, PrefectFuture[None]]:
    """Waits in short steps, so that a signal or a cancellation is delivered here."""
    while True:
        try:
            return ended.get(timeout=_LOOK_SECONDS)
        except queue.Empty:
            continue
