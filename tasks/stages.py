"""The stages as Prefect tasks. Each task supervises one stage process: `python -m millrace.stages.<stage>`."""

from typing import Any

from prefect import Task, task
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State
from prefect.states import Completed

from millrace.runtime.arguments import StageArguments
from tasks.jobs import StageName
from tasks.restart_budget import keep_going
from tasks.supervise import supervise

STAGE_TASK: dict[str, Any] = {
    # No limit: `keep_going` decides.
    "retries": 100_000,
    "retry_delay_seconds": 0,
    "retry_condition_fn": keep_going,
    "cache_policy": NO_CACHE,
    "persist_result": False,
}
"""Options of every stage task. None has tags: before Prefect starts a tagged task, also for a retry, it asks the server
for the tags' limits, so a stage that dies while the server is away could not be started again."""


def _run(stage: str, arguments: StageArguments, threads: int) -> State[None]:
    """Runs it to its end; the task's state then tells the last milestone that it reported."""
    return Completed(message=supervise(stage, arguments, threads=threads) or None)


@task(name="bootstrap", task_run_name="bootstrap", **STAGE_TASK)
def bootstrap(arguments: StageArguments, threads: int) -> State[None]:
    """Makes the run's start model unless it exists already."""
    return _run("bootstrap", arguments, threads)


@task(name="evaluate", task_run_name="evaluate-{arguments.replica}", **STAGE_TASK)
def evaluate(arguments: StageArguments, threads: int) -> State[None]:
    """Measures policy versions: beside training until the campaign ends, or the latest one at the end."""
    return _run("evaluate", arguments, threads)


@task(name="promote", task_run_name="promote", **STAGE_TASK)
def promote(arguments: StageArguments, threads: int) -> State[None]:
    """Promotes the latest checkpoint if it is better than the last promoted one; otherwise records why not."""
    return _run("promote", arguments, threads)


@task(name="train", task_run_name="train-{arguments.replica}", **STAGE_TASK)
def train(arguments: StageArguments, threads: int) -> State[None]:
    """Trains to the last step."""
    return _run("train", arguments, threads)


@task(name="sync_weights", task_run_name="sync_weights-{arguments.replica}", **STAGE_TASK)
def sync_weights(arguments: StageArguments, threads: int) -> State[None]:
    """Delivers policy versions to the generators until the campaign ends."""
    return _run("sync_weights", arguments, threads)


@task(name="generate", task_run_name="generate-{arguments.replica}", **STAGE_TASK)
def generate(arguments: StageArguments, threads: int) -> State[None]:
    """Generates trajectories until the campaign ends."""
    return _run("generate", arguments, threads)


@task(name="score", task_run_name="score-{arguments.replica}", **STAGE_TASK)
def score(arguments: StageArguments, threads: int) -> State[None]:
    """Scores trajectories until the campaign ends."""
    return _run("score", arguments, threads)


@task(name="verify", **STAGE_TASK)
def verify(arguments: StageArguments, threads: int) -> State[None]:
    """Trains on the original batches of a stored run again and compares the results."""
    return _run("verify", arguments, threads)


@task(name="compare", **STAGE_TASK)
def compare(arguments: StageArguments, threads: int) -> State[None]:
    """Computes several losses on the same stored batches."""
    return _run("compare", arguments, threads)


LONG_RUNNING: dict[StageName, Task[..., Any]] = {
    "train": train,
    "sync_weights": sync_weights,
    "generate": generate,
    "score": score,
    "evaluate": evaluate,
}
"""The stages that run as long as the campaign. The evaluation may end before, and is the only one that may."""
