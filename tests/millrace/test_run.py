"""The record of a run."""

import uuid

import pytest

from millrace.errors import RunExists, RunMissing
from millrace.run import (
    create_run,
    end_attempt,
    how_attempt_ended,
    latest_attempt,
    read_attempt,
    read_run,
    resume_run,
)
from storage.checkpoints import CheckpointWriter
from storage.memory import MemoryStore
from storage.store import BytesLike, Store

CONFIG = {"training": {"max_steps": 3}}


def test_a_run_id_is_claimed_once(memory_store: Store) -> None:
    create_run(memory_store, "mine", CONFIG)
    with pytest.raises(RunExists, match=r"'mine'.*--resume"):
        create_run(memory_store, "mine", CONFIG)
    assert read_run(memory_store)["run_id"] == "mine"


def test_each_start_is_an_attempt_of_its_own_and_reads_back_as_it_was(memory_store: Store) -> None:
    attempts = [create_run(memory_store, "mine", CONFIG)]
    attempts += [resume_run(memory_store, {"training": {"max_steps": steps}}) for steps in (4, 5)]
    assert [attempt.number for attempt in attempts] == [0, 1, 2]
    assert [read_attempt(memory_store, number) for number in range(3)] == attempts
    assert latest_attempt(memory_store) == attempts[2]


def test_an_attempt_says_what_made_its_numbers(memory_store: Store) -> None:
    provenance = create_run(memory_store, "mine", CONFIG).provenance
    assert {"torch", "pyarrow", "prefect"} <= provenance.dependencies.keys()


def test_the_first_word_on_how_an_attempt_ended_stays(memory_store: Store) -> None:
    assert how_attempt_ended(memory_store, 0) is None
    end_attempt(memory_store, 0, "finished")
    end_attempt(memory_store, 0, "stopped")
    assert how_attempt_ended(memory_store, 0) == "finished"
    assert how_attempt_ended(memory_store, 1) is None


def test_where_there_is_no_run_that_is_said() -> None:
    with pytest.raises(RunMissing, match=r"run\.json"):
        latest_attempt(MemoryStore("test-empty"))


class LostReplies(MemoryStore):
    """Creates, and says that something was there: as an object store does whose first reply was lost."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        super().put_if_absent(path, data)
        return False


def test_a_lost_reply_is_not_another_controller() -> None:
    store = LostReplies(f"test-{uuid.uuid4().hex}")
    assert create_run(store, "mine", {}).number == 0
    assert resume_run(store, {}).number == 1
    with pytest.raises(RunExists):
        create_run(store, "mine", {"other": 1})


def test_an_attempt_ends_at_the_run_s_last_step_or_where_its_own_budget_is_spent(memory_store: Store) -> None:
    def config(budget: int | None) -> dict[str, object]:
        return {"training": {"max_steps": 10}, "budget": {"max_steps": budget}}

    assert create_run(memory_store, "mine", config(4)).stop_at_step == 4
    assert resume_run(memory_store, config(None)).stop_at_step == 10
    CheckpointWriter(memory_store).commit(4, {}, {})
    assert resume_run(memory_store, config(3)).stop_at_step == 7
    assert resume_run(memory_store, config(8)).stop_at_step == 10
