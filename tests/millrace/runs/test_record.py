"""The record of a run, its state, and a person's note on it."""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.stores.memory import unused_name

from configs.schema import RunConfig
from flows.cli.main import main
from millrace.errors import InputError, RunExists, RunMissing
from millrace.maintenance.fsck import fsck
from millrace.runs.provenance import provenance
from millrace.runs.record import (
    CONTROLLER,
    KILLED_SECONDS,
    MAX_NOTE_CHARACTERS,
    Attempt,
    AttemptEnd,
    EndState,
    attempt_of_step,
    create_run,
    end_attempt,
    latest_attempt,
    of_attempt,
    read_attempt,
    read_end,
    read_note,
    read_run,
    resume_run,
    run_state,
    write_note,
)
from storage import layout
from storage.checkpoints import CheckpointWriter
from storage.errors import StreamCorrupt
from storage.stores.base import BytesLike, Store
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore

CONFIG = {"training": {"max_steps": 3}}


def attempt(config: dict[str, Any]) -> Attempt:
    return Attempt(number=0, config=config, t_started=0.0, provenance=provenance())


def test_a_run_id_is_claimed_once(memory_store: Store) -> None:
    with pytest.raises(RunMissing):
        latest_attempt(memory_store)
    create_run(memory_store, "mine", CONFIG)
    with pytest.raises(RunExists):
        create_run(memory_store, "mine", CONFIG)
    assert read_run(memory_store)["run_id"] == "mine"


RECORD = {"run_id": "mine", **asdict(attempt(CONFIG))}


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"[" * 100_000,
        b"[]",
        b"{}",
        *(
            json.dumps({**RECORD, **change}).encode()
            for change in (
                {"colour": 1},
                {"provenance": 3},
                {"config": [1]},
                {"origin": {"preset": 3}},
                {"number": 0.5},
            )
        ),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_damaged_record_of_a_run_is_named(memory_store: Store, content: bytes) -> None:
    memory_store.put("run.json", content)
    with pytest.raises(StreamCorrupt) as raised:
        read_attempt(memory_store, 0)
    assert raised.value.file == "run.json"


def test_a_folder_in_place_of_an_attempts_record_is_named(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    create_run(store, "mine", CONFIG)
    (tmp_path / "attempts" / "0001.json").mkdir(parents=True)
    with pytest.raises(StreamCorrupt):
        resume_run(store, CONFIG)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state": "well"}', b'{"state": []}'])
def test_a_damaged_record_of_an_attempts_end_is_no_end(memory_store: Store, content: bytes) -> None:
    create_run(memory_store, "mine", CONFIG)
    memory_store.put("attempts/0000.ended", content)
    assert read_end(memory_store, 0) is None


def test_each_start_is_an_attempt_that_reads_back_unchanged(memory_store: Store) -> None:
    attempts = [create_run(memory_store, "mine", CONFIG)]
    attempts += [resume_run(memory_store, {"training": {"max_steps": steps}}) for steps in (4, 5)]
    assert [start.number for start in attempts] == [0, 1, 2]
    assert [read_attempt(memory_store, number) for number in range(3)] == attempts
    assert latest_attempt(memory_store) == attempts[2]


def test_an_attempt_lists_settings_that_changed_since_the_previous_one(memory_store: Store) -> None:
    def config(steps: int, too_old: str) -> dict[str, Any]:
        values = {"training": {"max_steps": steps}, "staleness": {"too_old": too_old}}
        return RunConfig.model_validate(values).model_dump(mode="json")

    create_run(memory_store, "mine", config(3, "drop"))
    resume_run(memory_store, config(3, "drop"))
    resume_run(memory_store, config(4, "mask"))
    assert [read_attempt(memory_store, number).changes for number in range(3)] == [
        [],
        [],
        ['staleness.too_old was "drop" and is "mask"', "training.max_steps was 3 and is 4"],
    ]


@pytest.mark.parametrize(("mode", "bound"), [("async", 4), ("sync", 0)])
def test_an_attempt_knows_the_staleness_bound_in_force(mode: str, bound: int) -> None:
    config = {"pipeline": {"mode": mode}, "staleness": {"max_staleness": 4}}
    assert attempt(config).max_staleness == bound


def test_a_step_belongs_to_the_last_attempt_that_resumed_before_it(memory_store: Store) -> None:
    create_run(memory_store, "mine", CONFIG)
    checkpoints = CheckpointWriter(memory_store)
    # Attempt 1 was over before it had made a checkpoint.
    for step in (2, 2, 5):
        checkpoints.commit(step, {}, {})
        resume_run(memory_store, CONFIG)
    assert [attempt_of_step(memory_store, step).number for step in range(1, 8)] == [0, 0, 2, 2, 2, 3, 3]


def test_the_first_recorded_end_of_an_attempt_stays(memory_store: Store) -> None:
    assert read_end(memory_store, 0) is None
    end_attempt(memory_store, 0, "failed", "train-0 was killed by SIGKILL")
    end_attempt(memory_store, 0, "stopped")
    assert read_end(memory_store, 0) == AttemptEnd(state="failed", cause="train-0 was killed by SIGKILL")
    assert read_end(memory_store, 1) is None


class LostReplies(MemoryStore):
    """Creates, and says that something was there: as an object store does whose first reply was lost."""

    def put_if_absent(self, path: str, data: BytesLike) -> bool:
        super().put_if_absent(path, data)
        return False


def test_a_lost_reply_is_not_another_controller() -> None:
    store = LostReplies(unused_name())
    assert create_run(store, "mine", {}).number == 0
    assert resume_run(store, {}).number == 1
    with pytest.raises(RunExists):
        create_run(store, "mine", {"other": 1})


def test_an_attempt_ends_at_the_last_step_or_with_its_budget(memory_store: Store) -> None:
    def config(budget: int | None) -> dict[str, object]:
        return {"training": {"max_steps": 10}, "budget": {"max_steps": budget}}

    assert create_run(memory_store, "mine", config(4)).stop_at_step == 4
    assert resume_run(memory_store, config(None)).stop_at_step == 10
    CheckpointWriter(memory_store).commit(4, {}, {})
    assert resume_run(memory_store, config(3)).stop_at_step == 7
    assert resume_run(memory_store, config(8)).stop_at_step == 10


@pytest.mark.parametrize("state", ["finished", "stopped", "failed"])
def test_a_recorded_end_decides_whoever_still_writes(state: EndState) -> None:
    records = {"train-0": {"t": time.time()}}
    end = AttemptEnd(state=state, cause="the disk is full")
    assert run_state(end, time.time(), records) == (state, "the disk is full")


@pytest.mark.parametrize("alive", ["train-0", f"{CONTROLLER}-0", "the start", None])
def test_without_an_end_any_sign_of_life_means_running(alive: str | None) -> None:
    now, old = time.time(), time.time() - 2 * KILLED_SECONDS
    records = {name: {"t": now if name == alive else old} for name in ("train-0", f"{CONTROLLER}-0")}
    state, cause = run_state(None, now if alive == "the start" else old, records)
    assert (state, cause is None) == (("running", True) if alive else ("killed", False))


def test_records_of_an_earlier_attempt_are_no_sign_of_life() -> None:
    records = {"train-0": {"t": 1.0, "attempt": 0}, "score-0": {"t": 1.0, "attempt": 1}}
    assert list(of_attempt(1, records)) == ["score-0"]


@pytest.fixture
def noted(tmp_path: Path) -> Store:
    store = LocalStore(tmp_path / "noted", fsync=False)
    create_run(store, "noted", CONFIG)
    return store


def test_a_note_is_one_line_that_the_next_one_replaces(noted: Store) -> None:
    assert read_note(noted) == ""
    write_note(noted, "  the baseline:\n keep ü ")
    assert read_note(noted) == "the baseline: keep ü"
    assert layout.NOTE not in str(fsck(noted)), "a note is part of a sound run"
    write_note(noted, "x" * MAX_NOTE_CHARACTERS)
    with pytest.raises(InputError):
        write_note(noted, "x" * (MAX_NOTE_CHARACTERS + 1))
    assert read_note(noted) == "x" * MAX_NOTE_CHARACTERS
    write_note(noted, " ")
    assert not noted.exists(layout.NOTE)


def test_the_command_shows_a_note_and_replaces_it(noted: Store, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["note", noted.url, "keep this one"]) == 0
    assert main(["note", noted.url]) == 0
    assert capsys.readouterr().out == "keep this one\n"
    assert main(["note", noted.url, ""]) == 0
    assert read_note(noted) == ""
    assert main(["note", f"{noted.url}-none", "x"]) == 2
    assert "expected run.json there" in capsys.readouterr().err
    assert not Path(f"{noted.url}-none").exists()
