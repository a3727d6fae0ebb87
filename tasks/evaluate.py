"""Evaluation of one policy version: a task that supervises the evaluate stage's own process."""

from dataclasses import replace
from typing import Literal

from prefect import task

from millrace.stages.arguments import EVALUATE_LATEST, EVALUATE_START, StageArguments
from tasks.supervise import STAGE_TASK, supervise

_REPLICAS = {"start": EVALUATE_START, "end": EVALUATE_LATEST}


@task(name="evaluate", task_run_name="evaluate-{which}", **STAGE_TASK)
def evaluate(arguments: StageArguments, threads: int, which: Literal["start", "end"]) -> None:
    """Measures held-out accuracy of the base model (`start`) or the latest checkpoint (`end`)."""
    supervise("evaluate", replace(arguments, replica=_REPLICAS[which]), threads=threads)
