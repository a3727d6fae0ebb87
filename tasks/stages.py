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


def _stage_task(stage: str, description: str, run_name: str = "") -> Task[..., State[None]]:
    """Makes the task of one stage, called with its arguments and its number of CPU threads.

    The message of its final state is the last milestone that the stage reported.
    """

    def run(arguments: StageArguments, threads: int) -> State[None]:
        return Completed(message=supervise(stage, arguments, threads=threads) or None)

    run.__name__ = run.__qualname__ = stage
    return task(name=stage, description=description, task_run_name=f"{stage}{run_name}", **STAGE_TASK)(run)


_REPLICA = "-{arguments.replica}"
bootstrap = _stage_task("bootstrap", "Makes the run's start model unless it exists already.")
evaluate = _stage_task("evaluate", "Measures policy versions until the campaign ends, or the latest one.", _REPLICA)
promote = _stage_task("promote", "Promotes the latest checkpoint if it is better than the last promoted one.")
train = _stage_task("train", "Trains to the last step.", _REPLICA)
sync_weights = _stage_task("sync_weights", "Delivers policy versions until the campaign ends.", _REPLICA)
generate = _stage_task("generate", "Generates trajectories until the campaign ends.", _REPLICA)
score = _stage_task("score", "Scores trajectories until the campaign ends.", _REPLICA)
teach = _stage_task("teach", "Computes a teacher's log-probabilities until the campaign ends.", _REPLICA)
verify = _stage_task("verify", "Trains the original batches of a stored run again and compares the results.")
compare = _stage_task("compare", "Computes several losses on the same stored batches.")

STAGE_TASKS: dict[StageName, Task[..., State[None]]] = {
    "train": train,
    "sync_weights": sync_weights,
    "generate": generate,
    "score": score,
    "teach": teach,
    "evaluate": evaluate,
    "promote": promote,
}
"""The stages of jobs."""
