"""Where two stored runs part, as `millrace diff` tells it."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from support.replay.scripted_run import CONFIG, ScriptedRun
from support.stores.dict_store import DictStore

from configs.requests import ReplayRequest
from millrace.errors import ReplayError
from millrace.replay.diff import Diff, Difference, diff
from millrace.replay.results import write_spec
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


@pytest.mark.parametrize(
    ("change", "what", "where", "a", "b"),
    [
        ("prompts", "prompts", "group 7, member 1, token 0", 1, 2),
        ("versions", "versions", "group 7, member 1", [2, 2], [1, 2]),
        ("tokens", "tokens", "group 7, member 1, token 0", 11, 12),
        ("length", "tokens", "group 7, member 1", "3 tokens", "4 tokens"),
        ("rollout_logprobs", "rollout_logprobs", "group 7, member 1, token 0", -0.5, 0.5),
        ("rewards", "rewards", "group 7, member 1", 1.0, 0.5),
        ("advantages", "advantages", "group 7, member 1", 0.5, 1.5),
        ("groups", "groups", "trained in one run alone", [8], [1000]),
        ("order", "groups", "their order in the batch", [6, 7, 8], [7, 8, 6]),
    ],
)
def test_the_first_difference_in_a_batch_is_named(change: str, what: str, where: str, a: object, b: object) -> None:
    difference = against_the_plain_run(changed={change: 3}).batch
    assert difference is not None
    assert (difference.step, difference.what, difference.where) == (3, what, where)
    assert (difference.a, difference.b) == (a, b)


@pytest.mark.parametrize("what", ["trainer_logprobs", "loss", "grad_norm"])
def test_the_first_difference_in_the_numbers_is_named(what: str) -> None:
    result = against_the_plain_run(changed={what: 4})
    assert result.batch is None
    assert result.numbers is not None
    assert (result.numbers.step, result.numbers.what) == (4, what)
    assert json.loads(json.dumps(asdict(result)))["numbers"]["step"] == 4


def test_batch_and_numbers_may_differ_first_at_different_steps() -> None:
    result = against_the_plain_run(changed={"loss": 2, "tokens": 4})
    assert result.batch is not None
    assert result.numbers is not None
    assert (result.numbers.step, result.batch.step) == (2, 4)


def test_runs_may_have_no_step_in_common() -> None:
    assert diff(stored(), ScriptedRun(DictStore()).steps(7, 8).close()).steps == []


def test_the_difference_that_causes_the_others_is_named() -> None:
    found = against_the_plain_run(changed={"advantages": 3, "rewards": 3, "tokens": 3, "trainer_logprobs": 3})
    assert found.batch is not None
    assert found.batch.what == "tokens"


def test_a_step_that_was_rolled_back_is_no_difference() -> None:
    run = ScriptedRun(DictStore()).steps(1, 2).steps(3, 4, first_group=90)
    assert diff(stored(), run.store).batch is not None, "the groups of steps 3 and 4 are others at first"
    run.resume()
    assert diff(stored(), run.steps(3, LAST).close()).batch is None


def test_keys_of_the_config_that_differ_are_named_with_both_values() -> None:
    training = CONFIG["training"] | {"learning_rate": 0.25, "loss": {"name": "cispo"}}
    found = against_the_plain_run(config={"training": training})
    assert found.config == [
        Difference(name="training.learning_rate", a=0.5, b=0.25),
        Difference(name="training.loss.name", a=None, b="cispo"),
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


def test_another_start_model_is_named_by_file() -> None:
    first, other = stored(), stored()
    first.put(layout.START_HASHES, json.dumps({"model.safetensors": "aa", "tokenizer.json": "cc"}).encode())
    assert diff(first, other).start == []
    other.put(layout.START_HASHES, json.dumps({"model.safetensors": "bb", "tokenizer.json": "cc"}).encode())
    assert diff(first, other).start == [Difference(name="model.safetensors", a="aa", b="bb")]


def test_checkpoints_whose_weights_differ_are_listed() -> None:
    found = against_the_plain_run(changed={"checkpoint": 4})
    assert (found.checkpoints, found.checkpoints_differing) == ([1, 2, 3, 4, 5], [4])


def as_replay(source: str, folder: Path, *, of: int = 1) -> Store:
    """A replay's own run: what its trainer took lies in the source."""
    made = ScriptedRun(open_store(str(folder))).steps(1, LAST).close()
    for name in ("trajectories", "scores"):
        made.delete_tree(f"streams/{name}")
    write_spec(made, ReplayRequest(sources=[source] * of, job="train", run_id="replay"))
    return made


def test_a_replay_is_compared_by_its_source_s_trajectories(tmp_path: Path) -> None:
    original = ScriptedRun(open_store(str(tmp_path / "original"))).steps(1, LAST).close()
    found = diff(original, as_replay(original.url, tmp_path / "replay"))
    assert (found.steps, found.batch, found.numbers) == ([1, LAST], None, None)


def test_a_replay_of_several_runs_is_refused(tmp_path: Path) -> None:
    original = ScriptedRun(open_store(str(tmp_path / "original"))).steps(1, LAST).close()
    with pytest.raises(ReplayError):
        diff(original, as_replay(original.url, tmp_path / "replay", of=2))
