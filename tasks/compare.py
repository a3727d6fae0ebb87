"""The comparison of losses on stored batches: a task that supervises the compare stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="compare", **STAGE_TASK)
def compare(arguments: StageArguments, threads: int) -> None:
    """Puts the same stored batches through several losses."""
    supervise("compare", arguments, threads=threads)
