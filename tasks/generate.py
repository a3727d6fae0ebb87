"""One generator: a long-running task that supervises the generate stage's own process."""

from prefect import task

from millrace.stages.arguments import StageArguments
from tasks.supervise import STAGE_TASK, supervise


@task(name="generate", task_run_name="generate-{arguments.replica}", **STAGE_TASK)
def generate(arguments: StageArguments, threads: int) -> None:
    """Generates trajectories until the campaign ends."""
    supervise("generate", arguments, threads=threads)
