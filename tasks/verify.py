"""The verification of a stored run: a task that supervises the verify stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="verify", **STAGE_TASK)
def verify(arguments: StageArguments, threads: int) -> None:
    """Trains the original batches of a stored run again, and compares."""
    supervise("verify", arguments, threads=threads)
