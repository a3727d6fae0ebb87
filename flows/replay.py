"""The replay: goes through stored runs again, reading only, and publishes what it finds into a run of its own.

    check ─► run.json, replay.json, start model ─► score anew? ─► verify │ train ─► evaluate │ compare ─► results
                                                               replay/*.json, *.parquet, report.md in the replay's run

The same score and train stages as a campaign's do the work, each in a process of its own, supervised by a task.
"""

import shutil
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from prefect import flow, runtime
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from configs.replay import ReplayRequest
from flows.prepare_replay import prepare
from flows.replay_results import put_together
from flows.replay_words import as_markdown
from flows.shown import show
from millrace.run import end_attempt
from millrace.stages.arguments import StageArguments
from storage import layout
from storage.factory import open_store
from tasks.compare import compare
from tasks.evaluate import evaluate
from tasks.score import score
from tasks.stop import STOP
from tasks.train import train
from tasks.verify import verify


def _flow_run_name() -> str:
    request = runtime.flow_run.parameters["request"]
    return str(request.run_id if isinstance(request, ReplayRequest) else request["run_id"])


@flow(
    name="replay",
    flow_run_name=_flow_run_name,
    # Room for the most scorers a config may ask for.
    task_runner=ThreadPoolTaskRunner(max_workers=64),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def replay(request: ReplayRequest) -> dict[str, Any]:
    """Goes through stored runs as `request` says. Returns what it found, which its run keeps in `replay/`.

    Args:
        request: Which stored runs, what to do with them, and where the replay's own run lies.

    Raises InputError for a person's mistake before anything has run, and StageDied if a stage can't be kept alive.
    """
    STOP.clear()
    run = prepare(request)
    config = run.config
    arguments = StageArguments(run_url=run.run_url, attempt=0, replica=0, handover=run.handover)
    store = open_store(run.run_url)
    finished = False
    try:
        if request.rescore is not None:
            _together(
                score.submit(replace(arguments, replica=replica), config.scoring.threads)
                for replica in range(config.scoring.replicas)
            )
        match request.job:
            case "verify":
                verify(arguments, config.training.threads)
            case "compare":
                compare(arguments, config.training.threads)
            case "train":
                train(arguments, config.training.threads)
                evaluate(arguments, config.training.threads, "end")
        found = put_together(store)
        report = as_markdown(found, store)
        store.put(f"{layout.REPLAY_RESULTS}/report.md", report.encode())
        show(report, key="replay", description=f"What the replay of {request.sources[0]} found")
        finished = True
        return found
    finally:
        STOP.set()
        shutil.rmtree(run.handover, ignore_errors=True)
        end_attempt(store, 0, "finished" if finished else "stopped")


def _together(started: Iterable[PrefectFuture[None]]) -> None:
    """Waits for all of them, each of which runs from its start on."""
    for future in list(started):
        future.result()
