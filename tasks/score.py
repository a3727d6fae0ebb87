"""One scorer: a long-running task that supervises the score stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="score", task_run_name="score-{arguments.replica}", **STAGE_TASK)
def score(arguments: StageArguments, threads: int) -> None:
    """Scores trajectories until the campaign ends."""
    supervise("score", arguments, threads=threads)
