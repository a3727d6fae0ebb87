"""The trainer: a long-running task that supervises the train stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="train", task_run_name="train-{arguments.replica}", **STAGE_TASK)
def train(arguments: StageArguments, threads: int) -> None:
    """Trains to the last step; the campaign ends with it."""
    supervise("train", arguments, threads=threads)
