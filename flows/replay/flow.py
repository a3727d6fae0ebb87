"""A replay reads stored runs again, and writes its results to a run of its own.

    check ─► run.json, replay.json, start model ─► score anew? ─► verify │ train ─► evaluate │ compare ─► results
                                                               replay/*.json, *.parquet, report.md in the replay's run

Each stage runs in its own process, supervised by a task; score and train are the stages of a campaign. Ctrl-C and
SIGTERM drain them, as in a campaign: the trainer finishes its step and its checkpoint.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import PurePosixPath
from typing import Any

from prefect import flow, runtime
from prefect.futures import PrefectFuture
from prefect.task_runners import ThreadPoolTaskRunner

from configs.requests import ReplayRequest
from flows.campaign.attempt import attempt_under_way
from flows.campaign.stage_group import StageGroup
from flows.display.artifacts import artifact_key, show
from flows.replay.formatting import as_markdown
from flows.replay.prepare import prepare
from flows.replay.results import collect
from millrace.runs.record import end_attempt
from millrace.runtime.arguments import EVALUATE_AT_END, StageArguments
from storage import layout
from tasks.stages import compare, evaluate, score, train, verify
from tasks.stop import STOP, STOP_NOW


def _flow_run_name() -> str:
    request = runtime.flow_run.parameters["request"]
    return str(request.run_id if isinstance(request, ReplayRequest) else request["run_id"])


@flow(
    name="replay",
    flow_run_name=_flow_run_name,
    # Enough for the largest number of scorers that a config allows.
    task_runner=ThreadPoolTaskRunner(max_workers=64),  # type: ignore[arg-type]
    persist_result=False,
    validate_parameters=True,
)
def replay(request: ReplayRequest) -> dict[str, Any]:
    """Runs the requested replay. Returns its results by name, which its own run stores in `replay/`.

    Args:
        request: Which stored runs, what to do with them, and where the replay's own run is written.

    Raises InputError for a user error before anything has run, and StageDied if a stage can't be kept alive.
    """
    STOP.clear()
    STOP_NOW.clear()
    prepared = prepare(request)
    store, config = prepared.store, prepared.config
    arguments = StageArguments(run_url=store.url, attempt=0, replica=0, handover=prepared.handover)
    with attempt_under_way(store, 0, prepared.handover, "replay"):
        if request.rescore is not None:
            replicas = range(config.scoring.replicas)
            _finish(
                {f"score-{n}": score.submit(replace(arguments, replica=n), config.scoring.threads) for n in replicas}
            )
        threads = config.training.threads
        match request.job:
            case "verify":
                _finish({"verify-0": verify.submit(arguments, threads)})
            case "compare":
                _finish({"compare-0": compare.submit(arguments, threads)})
            case "train":
                _finish({"train-0": train.submit(arguments, threads)})
                _finish({"evaluate-1": evaluate.submit(replace(arguments, replica=EVALUATE_AT_END), threads)})
        found = collect(store)
        report = as_markdown(found, store)
        store.put(f"{layout.REPLAY_RESULTS}/report.md", report.encode())
        key = artifact_key(PurePosixPath(store.url).name, "replay")
        show(report, key=key, description=f"What the replay of {request.sources[0]} found")
        end_attempt(store, 0, "finished")
        return found


def _finish(stages: Mapping[str, PrefectFuture[Any]]) -> None:
    """Waits until all of these tasks have ended. Ctrl-C and SIGTERM drain their stages; a second one kills them.

    Raises the error of a stage that failed.
    """
    with StageGroup() as group:
        for stage, future in stages.items():
            group.add(stage, future)
        for _ in stages:
            group.wait_for_first()
    STOP.clear()
