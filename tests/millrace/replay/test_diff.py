"""Where two stored runs part, as `millrace diff` tells it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.replay.scripted_run import CONFIG, ScriptedRun
from support.stores.dict_store import DictStore

from configs.replay import ReplayRequest
from millrace.errors import ReplayError
from millrace.replay.diff import Diff, Difference, diff
from millrace.replay.spec import write_spec
from storage import layout
from storage.stores.base import Store
from storage.stores.factory import open_store

LAST = 5


def stored(**how: Any) -> Store:
    return ScriptedRun(DictStore(), **how).steps(1, LAST).close()


def against_the_plain_run(**how: Any) -> Diff:
    return diff(stored(), stored(**how))


def test_two_runs_that_did_the_same_do_not_part() -> None:
    found = diff(stored(), stored())
    assert (found.config, found.provenance, found.start, found.batch, found.numbers) == ([], [], [], None, None)
    assert (found.steps, found.checkpoints, found.checkpoints_differing) == ([1, LAST], [1, 2, 3, 4, 5], [])
    assert found.sentence.startswith("steps 1 to 5 are the same, bit for bit")


IN_THE_BATCH = {
    "prompts": (7, "token 0", 1, 2),
    "versions": (7, "", [2, 2], [1, 2]),
    "tokens": (7, "token 0", 11, 12),
    "rollout_logprobs": (7, "token 0", -0.5, 0.5),
    "rewards": (7, "", 1.0, 0.5),
    "advantages": (7, "", 0.5, 1.5),
}


@pytest.mark.parametrize("what", IN_THE_BATCH)
def test_the_first_step_whose_batch_is_another_is_named_with_the_value(what: str) -> None:
    found = against_the_plain_run(changed={what: 3}).batch
    assert found is not None
    group_id, place, a, b = IN_THE_BATCH[what]
    where = f"group {group_id}, member 1" + (f", {place}" if place else "")
    assert (found.step, found.what, found.where, found.a, found.b) == (3, what, where, a, b)


def test_of_several_differences_in_a_batch_that_is_named_which_the_others_follow_from() -> None:
    found = against_the_plain_run(changed={"advantages": 3, "rewards": 3, "tokens": 3, "trainer_logprobs": 3})
    assert found.batch is not None
    assert found.batch.what == "tokens"
    assert "differ at step 3 in what was trained on: tokens" in found.sentence


def test_an_answer_that_goes_on_for_longer_is_a_difference_in_tokens() -> None:
    found = against_the_plain_run(changed={"length": 3}).batch
    assert found is not None
    assert (found.step, found.what, found.a, found.b) == (3, "tokens", "3 tokens", "4 tokens")


def test_groups_that_only_one_of_them_trained_are_named() -> None:
    found = against_the_plain_run(changed={"groups": 2}).batch
    assert found is not None
    assert (found.step, found.what, found.a, found.b) == (2, "groups", [5], [1000])


def test_another_order_in_the_batch_is_a_difference() -> None:
    found = against_the_plain_run(changed={"order": 2}).batch
    assert found is not None
    assert (found.step, found.what, found.a, found.b) == (2, "groups", [3, 4, 5], [4, 5, 3])


@pytest.mark.parametrize(
    ("what", "because"),
    [
        ("trainer_logprobs", "the weights before the step differ"),
        ("loss", "the loss differs"),
        ("grad_norm", "the gradient differs"),
    ],
)
def test_the_first_step_whose_numbers_are_others_is_named_with_what_follows_from_it(what: str, because: str) -> None:
    found = against_the_plain_run(changed={what: 4})
    assert found.batch is None
    assert found.numbers is not None
    assert (found.numbers.step, found.numbers.what) == (4, what)
    assert found.sentence.startswith("they are the same before step 4 and differ at step 4")
    assert because in found.sentence


def test_batch_and_numbers_are_told_apart_where_they_part_at_different_steps() -> None:
    found = against_the_plain_run(changed={"loss": 2, "tokens": 4})
    assert found.batch is not None
    assert found.numbers is not None
    assert (found.numbers.step, found.batch.step) == (2, 4)
    assert "differ at step 2 in loss" in found.sentence


def test_a_step_that_was_rolled_back_is_no_difference() -> None:
    run = ScriptedRun(DictStore()).steps(1, 2).steps(3, 4, first_group=90)
    assert diff(stored(), run.store).batch is not None, "the groups of steps 3 and 4 are others at first"
    run.resume()
    assert diff(stored(), run.steps(3, LAST).close()).batch is None


def test_keys_of_the_config_that_differ_are_named_with_both_values() -> None:
    training = CONFIG["training"] | {"learning_rate": 0.25, "loss": "cispo"}
    found = against_the_plain_run(config={"training": training})
    assert found.config == [
        Difference(name="training.learning_rate", a=0.5, b=0.25),
        Difference(name="training.loss", a=None, b="cispo"),
    ]
    assert found.batch is found.numbers is None, "what did not change anything is told all the same"


def test_the_configs_compared_are_those_in_force_where_the_runs_part() -> None:
    def run(changed: dict[str, int], last_threads: int) -> Store:
        made = ScriptedRun(DictStore(), changed=changed).steps(1, 2)
        made.resume(training=CONFIG["training"] | {"threads": 2})
        made.steps(3, 4)
        made.resume(training=CONFIG["training"] | {"threads": last_threads})
        return made.steps(5, LAST).close()

    plain = stored()
    assert diff(plain, run({"loss": 1}, 1)).config == []
    assert diff(plain, run({"loss": 4}, 1)).config == [Difference(name="training.threads", a=1, b=2)]
    assert diff(plain, run({}, 7)).config == [Difference(name="training.threads", a=1, b=7)]


def test_another_version_of_the_reward_is_told() -> None:
    found = against_the_plain_run(changed={"verifier_version": 1})
    assert found.provenance == [Difference(name="reward version", a="1", b="2")]


def test_another_start_model_or_tokenizer_is_told_by_file_where_both_know_theirs() -> None:
    one, other = stored(), stored()
    one.put(layout.START_HASHES, json.dumps({"model.safetensors": "aa", "tokenizer.json": "cc"}).encode())
    assert diff(one, other).start == []
    other.put(layout.START_HASHES, json.dumps({"model.safetensors": "bb", "tokenizer.json": "cc"}).encode())
    assert diff(one, other).start == [Difference(name="model.safetensors", a="aa", b="bb")]


def test_checkpoints_whose_weights_differ_are_listed() -> None:
    found = against_the_plain_run(changed={"checkpoint": 4})
    assert (found.checkpoints, found.checkpoints_differing) == ([1, 2, 3, 4, 5], [4])
    assert "4 of 5 checkpoints" in found.sentence


def test_runs_without_a_step_in_common_are_said_to_have_none() -> None:
    later = ScriptedRun(DictStore()).steps(7, 8).close()
    found = diff(stored(), later)
    assert found.steps == []
    assert found.sentence == "they have no step in common"


def test_all_of_it_is_plain_json() -> None:
    found = against_the_plain_run(changed={"versions": 3, "loss": 3})
    assert json.loads(json.dumps(asdict(found)))["batch"]["step"] == 3


def as_replay(source: str, folder: Path, *, of: int = 1) -> Store:
    """A replay's own run: what its trainer took lies in the source."""
    made = ScriptedRun(open_store(str(folder))).steps(1, LAST).close()
    for name in ("trajectories", "scores"):
        made.delete_tree(f"streams/{name}")
    write_spec(made, ReplayRequest(sources=[source] * of, job="train", run_id="replay"))
    return made


def test_a_replay_is_compared_by_the_trajectories_of_the_run_that_it_went_through(tmp_path: Path) -> None:
    original = ScriptedRun(open_store(str(tmp_path / "original"))).steps(1, LAST).close()
    found = diff(original, as_replay(original.url, tmp_path / "replay"))
    assert (found.steps, found.batch, found.numbers) == ([1, LAST], None, None)


def test_a_replay_of_several_runs_is_refused(tmp_path: Path) -> None:
    original = ScriptedRun(open_store(str(tmp_path / "original"))).steps(1, LAST).close()
    with pytest.raises(ReplayError, match="a replay of 2 stored runs"):
        diff(original, as_replay(original.url, tmp_path / "replay", of=2))
