"""When a job of a work pool is asked for again."""

from uuid import uuid4

from prefect.client.schemas.objects import TaskRun
from prefect.states import Failed

from millrace.errors import InputError, PlaceYielded, StageDied
from tasks.remote_stage import place_again, run_remotely


def new_task_run() -> TaskRun:
    return TaskRun(id=uuid4(), task_key="place", dynamic_key="0")


def again(task_run: TaskRun, error: Exception) -> bool:
    return place_again(run_remotely, task_run, Failed(data=error))


def test_a_place_that_was_given_back_is_asked_for_again_as_often_as_need_be() -> None:
    run = new_task_run()
    assert all(again(run, PlaceYielded("host 0 is away")) for _ in range(10))
    assert again(run, StageDied("lost")), "none of them was a death"


def test_other_ends_are_those_of_any_stage() -> None:
    run = new_task_run()
    assert not again(run, InputError("no"))
    assert [again(run, StageDied("lost")) for _ in range(3)] == [True, True, False]
