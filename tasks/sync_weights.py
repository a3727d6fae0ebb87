"""Weight sync: a long-running task that supervises the sync_weights stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="sync_weights", task_run_name="sync_weights-{arguments.replica}", **STAGE_TASK)
def sync_weights(arguments: StageArguments, threads: int) -> None:
    """Delivers policy versions to the generators until the campaign ends."""
    supervise("sync_weights", arguments, threads=threads)
