"""The restart budget of a stage, without a clock, and the retry decisions that Prefect asks for."""

from collections.abc import Iterator
from uuid import uuid4

import pytest
from prefect import task
from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from millrace.errors import InputError, LedgerMismatch, PlaceYielded, RolledBack, StageDied
from storage.errors import Fenced
from tasks.restart_budget import RestartBudget, keep_going, own_budget
from tasks.stop import STOP

HANG = 45.0


def deaths_until_given_up(at_work_seconds: float, hang_seconds: float = HANG) -> int | None:
    """Counts the deaths of a stage that dies again and again, `at_work_seconds` after it was ready."""
    budget = RestartBudget()
    for death in range(1, 50):
        budget.add_work(at_work_seconds, hang_seconds)
        if not budget.record_death("killed"):
            return death
    return None


@pytest.mark.parametrize("at_work_seconds", [0.0, 1.0, 29.0, HANG, HANG + 20, 2 * HANG - 1])
def test_a_stage_that_dies_soon_is_given_up_at_its_third_death(at_work_seconds: float) -> None:
    assert deaths_until_given_up(at_work_seconds) == 3


def test_a_stage_that_works_for_a_while_between_deaths_is_never_given_up() -> None:
    assert deaths_until_given_up(2 * HANG) is None


@pytest.mark.parametrize(("at_work_seconds", "deaths"), [(29.0, 3), (30.0, None)])
def test_the_window_is_a_minute_at_least(at_work_seconds: float, deaths: int | None) -> None:
    assert deaths_until_given_up(at_work_seconds, hang_seconds=5.0) == deaths


@task
def stage() -> None: ...


@pytest.fixture
def run() -> Iterator[TaskRun]:
    yield TaskRun(id=uuid4(), task_key="stage", dynamic_key="0")
    STOP.clear()


def test_a_stage_that_died_is_started_again_and_reports_the_first_line_as_cause(
    run: TaskRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[object, ...]] = []
    monkeypatch.setattr("tasks.restart_budget.emit", lambda *event: told.append(event))
    monkeypatch.setenv("PREFECT__RUNTIME__TASK_RUN__ID", str(run.id))
    own_budget("train-0", "runs/a")
    assert told == []
    assert keep_going(stage, run, Failed(data=StageDied("train-0 was killed by SIGKILL\nthe end of log:\n…")))
    own_budget("train-0", "runs/a")
    payload = {"stage": "train-0", "cause": "train-0 was killed by SIGKILL", "restarts": 1}
    assert told == [("stage.restarted", "runs/a", payload)]


@pytest.mark.parametrize(
    "error", [InputError("no"), Fenced("taken over"), LedgerMismatch("two more"), PlaceYielded("free")]
)
def test_an_error_that_a_restart_would_repeat_ends_the_stage(run: TaskRun, error: Exception) -> None:
    assert not keep_going(stage, run, Failed(data=error))


def test_a_rollback_is_not_a_death(run: TaskRun) -> None:
    assert all(keep_going(stage, run, Failed(data=RolledBack("collapsed"))) for _ in range(10))


def test_a_stage_is_not_started_again_while_the_campaign_ends(run: TaskRun) -> None:
    STOP.set()
    assert not keep_going(stage, run, Failed(data=StageDied("dead")))
