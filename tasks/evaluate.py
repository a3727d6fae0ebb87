"""Evaluation of one policy version: a task that supervises the evaluate stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="evaluate", task_run_name="evaluate-{arguments.replica}", **STAGE_TASK)
def evaluate(arguments: StageArguments, threads: int) -> None:
    """Measures held-out accuracy of the base model (replica 0) or the latest checkpoint (replica 1)."""
    supervise("evaluate", arguments, threads=threads)
