"""How often a stage may die: its budget of restarts, without a clock, and what Prefect is told."""

from uuid import uuid4

import pytest
from prefect import task
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from millrace.errors import InputError, LedgerMismatch, PlaceYielded, StageDied
from storage.errors import Fenced
from tasks.restart_budget import RestartBudget, keep_going, restart_budget_of
from tasks.stop import STOP

HANG = 45.0


def deaths_until_given_up(at_work_seconds: float, most: int = 50) -> int | None:
    """Of a stage that dies again and again, so long after it was ready."""
    budget = RestartBudget()
    for death in range(1, most + 1):
        budget.add_work(at_work_seconds, HANG)
        if not budget.record_death("killed"):
            return death
    return None


@pytest.mark.parametrize("at_work_seconds", [0.0, 1.0, 29.0, HANG, HANG + 20, 2 * HANG - 1])
def test_a_stage_that_dies_soon_is_given_up_at_its_third_death(
    at_work_seconds: float,
) -> None:
    assert deaths_until_given_up(at_work_seconds) == 3


def test_a_stage_that_works_for_a_while_between_deaths_may_die_as_often_as_it_likes() -> None:
    assert deaths_until_given_up(2 * HANG) is None


def test_the_window_is_a_minute_at_least() -> None:
    for at_work_seconds, given_up in ((29.0, True), (30.0, False)):
        budget = RestartBudget()
        for _ in range(2):
            budget.add_work(at_work_seconds, hang_seconds=5.0)
            assert budget.record_death("killed")
        budget.add_work(at_work_seconds, hang_seconds=5.0)
        assert budget.record_death("killed") != given_up


@task
def stage() -> None:
    """Stands for one; never run."""


def asked(task_run: TaskRun, error: Exception) -> bool:
    return keep_going(stage, task_run, Failed(data=error))


def new_task_run() -> TaskRun:
    return TaskRun(id=uuid4(), task_key="stage", dynamic_key="0")


def test_a_stage_that_died_is_started_again_and_its_cause_is_the_first_line() -> None:
    run = new_task_run()
    assert asked(run, StageDied("train-0 was killed by SIGKILL\nthe end of log:\n…"))
    assert restart_budget_of(str(run.id)).cause == "train-0 was killed by SIGKILL"


@pytest.mark.parametrize(
    "error", [InputError("no"), Fenced("taken over"), LedgerMismatch("two more"), PlaceYielded("free")]
)
def test_what_a_restart_would_not_help_ends_the_stage(error: Exception) -> None:
    assert not asked(new_task_run(), error)


def test_nothing_is_started_again_while_the_campaign_ends() -> None:
    STOP.set()
    try:
        assert not asked(new_task_run(), StageDied("dead"))
    finally:
        STOP.clear()
