"""The record of a run."""

import hashlib
import json
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
from support.stores.memory import unused_name

from configs.schema import RunConfig
from configs.stored import config_hash
from millrace.errors import RunExists, RunMissing
from millrace.runs.record import (
    Attempt,
    AttemptEnd,
    attempt_of_step,
    create_run,
    differences,
    end_attempt,
    latest_attempt,
    provenance,
    read_attempt,
    read_end,
    read_run,
    resume_run,
)
from storage.checkpoints import CheckpointWriter
from storage.errors import StreamCorrupt
from storage.stores.base import BytesLike, Store
from storage.stores.local import LocalStore
from storage.stores.memory import MemoryStore

CONFIG = {"training": {"max_steps": 3}}


def test_a_run_id_is_claimed_once(memory_store: Store) -> None:
    create_run(memory_store, "mine", CONFIG)
    with pytest.raises(RunExists, match=r"'mine'.*--resume"):
        create_run(memory_store, "mine", CONFIG)
    assert read_run(memory_store)["run_id"] == "mine"


RECORD = {"run_id": "mine", "number": 0, "config": CONFIG, "t_started": 0.0, "provenance": asdict(provenance())}


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        (b"", "not JSON: "),
        (b"[" * 100_000, "not JSON: values are nested too deeply"),
        (b"[]", "not a JSON object"),
        (b"{}", "it names no run_id"),
        (json.dumps({**RECORD, "colour": 1}).encode(), "not the record of an attempt: .*unexpected keyword .*'colour'"),
        (json.dumps({"run_id": "mine"}).encode(), "not the record of an attempt: 'provenance'"),
        (json.dumps({**RECORD, "provenance": 3}).encode(), "not the record of an attempt: "),
        (
            json.dumps({**RECORD, "config": [1]}).encode(),
            "not the record of an attempt: expected a config and whole numbers",
        ),
    ],
    ids=lambda content: repr(content[:20]),
)
def test_a_damaged_record_of_a_run_is_named_with_what_to_do(memory_store: Store, content: bytes, problem: str) -> None:
    memory_store.put("run.json", content)
    with pytest.raises(StreamCorrupt, match=rf"^run\.json: {problem}.*; restore this file from a copy of the run$"):
        read_attempt(memory_store, 0)


def test_a_folder_in_place_of_an_attempts_record_is_named_with_what_to_do(tmp_path: Path) -> None:
    store = LocalStore(tmp_path)
    create_run(store, "mine", CONFIG)
    (tmp_path / "attempts" / "0001.json").mkdir(parents=True)
    with pytest.raises(StreamCorrupt, match=r"^attempts/0001\.json: .* no file .*; remove it, or restore this file"):
        resume_run(store, CONFIG)


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"state": "well"}', b'{"state": []}'])
def test_a_damaged_note_of_an_attempts_end_is_none(memory_store: Store, content: bytes) -> None:
    create_run(memory_store, "mine", CONFIG)
    memory_store.put("attempts/0000.ended", content)
    assert read_end(memory_store, 0) is None


def test_each_start_is_an_attempt_of_its_own_and_reads_back_as_it_was(memory_store: Store) -> None:
    attempts = [create_run(memory_store, "mine", CONFIG)]
    attempts += [resume_run(memory_store, {"training": {"max_steps": steps}}) for steps in (4, 5)]
    assert [attempt.number for attempt in attempts] == [0, 1, 2]
    assert [read_attempt(memory_store, number) for number in range(3)] == attempts
    assert latest_attempt(memory_store) == attempts[2]


def test_an_attempt_says_which_settings_differ_from_those_of_the_one_before(memory_store: Store) -> None:
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


def test_a_run_from_before_tokens_were_masked_dropped_what_was_too_old(memory_store: Store) -> None:
    values = RunConfig.model_validate({"training": {"max_steps": 3}}).model_dump(mode="json")
    values["staleness"]["too_old"] = "wait"
    old = {**values, "staleness": {"max_staleness": values["staleness"]["max_staleness"]}}
    create_run(memory_store, "mine", old)
    assert resume_run(memory_store, values).changes == ['staleness.too_old was "drop" and is "wait"']


def test_an_attempt_says_what_made_its_numbers(memory_store: Store) -> None:
    made_by = create_run(memory_store, "mine", CONFIG).provenance
    assert {"torch", "pyarrow", "prefect"} <= made_by.dependencies.keys()
    assert None not in made_by.dependencies.values()
    assert made_by.cpu, "the same code on another CPU may round otherwise"


def test_an_attempt_says_which_functions_of_one_s_own_it_trained_with(memory_store: Store) -> None:
    own = "tests.support.training.own_functions"
    training = {"max_steps": 3, "loss": {"name": f"{own}:capped"}, "advantage": f"{own}:better_than_half"}
    config = RunConfig.model_validate({"training": training}).model_dump(mode="json")
    made_by = create_run(memory_store, "mine", config).provenance.dependencies
    files = sorted((Path(__file__).parents[3] / "tests/support/training").glob("*.py"))
    expected = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:12]
    assert (made_by[f"{own}:capped"], made_by[f"{own}:better_than_half"]) == (expected, expected)


def test_an_attempt_keeps_the_hash_of_its_own_config(memory_store: Store) -> None:
    first = RunConfig.model_validate({"training": {"max_steps": 3}})
    other = RunConfig.model_validate({"training": {"max_steps": 4}})
    create_run(memory_store, "mine", first.model_dump(mode="json"))
    resume_run(memory_store, other.model_dump(mode="json"))
    kept = [read_attempt(memory_store, number).provenance.config_hash for number in range(2)]
    assert kept == [config_hash(config.model_dump(mode="json")) for config in (first, other)]


@pytest.mark.parametrize(("mode", "bound"), [("async", 4), ("sync", 0)])
def test_an_attempt_knows_the_staleness_bound_in_force(mode: str, bound: int) -> None:
    config = {"pipeline": {"mode": mode}, "staleness": {"max_staleness": 4}}
    assert Attempt(number=0, config=config, t_started=0.0).max_staleness == bound


def test_records_of_before_cpu_and_hash_were_kept_read_as_ever(memory_store: Store) -> None:
    create_run(memory_store, "mine", CONFIG)
    record = json.loads(bytes(memory_store.get("run.json")))
    del record["provenance"]["cpu"], record["provenance"]["config_hash"]
    memory_store.put("run.json", json.dumps(record).encode())
    made_by = read_attempt(memory_store, 0).provenance
    assert made_by.cpu is made_by.config_hash is None
    assert differences(made_by, provenance()) == {}, "what is not known does not differ"


def test_what_differs_between_two_processes_is_named_with_both_values() -> None:
    ours = provenance(CONFIG)
    theirs = replace(
        ours,
        cpu="an abacus",
        commit="0123abcd",
        config_hash="another",
        dependencies=ours.dependencies | {"torch": "0.1", "abacus": "1"},
    )
    assert differences(ours, ours) == {}
    assert differences(ours, theirs) == {
        "commit": (ours.commit, "0123abcd"),
        "cpu": (ours.cpu, "an abacus"),
        "dependencies.torch": (ours.dependencies["torch"], "0.1"),
    }


def test_a_step_belongs_to_the_last_attempt_that_went_on_from_before_it(memory_store: Store) -> None:
    create_run(memory_store, "mine", CONFIG)
    checkpoints = CheckpointWriter(memory_store)
    # Attempt 1 was over before it had made a checkpoint.
    for step in (2, 2, 5):
        checkpoints.commit(step, {}, {})
        resume_run(memory_store, CONFIG)
    assert [attempt_of_step(memory_store, step).number for step in range(1, 8)] == [0, 0, 2, 2, 2, 3, 3]


def test_the_first_word_on_how_an_attempt_ended_stays(memory_store: Store) -> None:
    assert read_end(memory_store, 0) is None
    end_attempt(memory_store, 0, "finished")
    end_attempt(memory_store, 0, "stopped")
    assert read_end(memory_store, 0) == AttemptEnd(state="finished")
    assert read_end(memory_store, 1) is None


def test_the_end_of_a_failed_attempt_keeps_its_cause(memory_store: Store) -> None:
    end_attempt(memory_store, 0, "failed", "train-0 was killed by SIGKILL")
    assert read_end(memory_store, 0) == AttemptEnd(state="failed", cause="train-0 was killed by SIGKILL")


def test_where_there_is_no_run_that_is_said(memory_store: Store) -> None:
    with pytest.raises(RunMissing, match=r"run\.json"):
        latest_attempt(memory_store)


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


def test_an_attempt_ends_at_the_run_s_last_step_or_where_its_own_budget_is_spent(memory_store: Store) -> None:
    def config(budget: int | None) -> dict[str, object]:
        return {"training": {"max_steps": 10}, "budget": {"max_steps": budget}}

    assert create_run(memory_store, "mine", config(4)).stop_at_step == 4
    assert resume_run(memory_store, config(None)).stop_at_step == 10
    CheckpointWriter(memory_store).commit(4, {}, {})
    assert resume_run(memory_store, config(3)).stop_at_step == 7
    assert resume_run(memory_store, config(8)).stop_at_step == 10
