"""The promotion gate: a task that supervises the promote stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="promote", task_run_name="promote", **STAGE_TASK)
def promote(arguments: StageArguments, threads: int) -> None:
    """Promotes the latest checkpoint if it is better than the last promoted one; else says why not."""
    supervise("promote", arguments, threads=threads)
