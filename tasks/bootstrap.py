"""Bootstrap of a start model: a task that supervises the bootstrap stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="bootstrap", task_run_name="bootstrap", **STAGE_TASK)
def bootstrap(arguments: StageArguments, threads: int) -> None:
    """Makes the run's start model, unless it is there already."""
    supervise("bootstrap", arguments, threads=threads)
