"""The first difference between two stored runs, as `millrace diff` reports it."""

import json
from pathlib import Path
from typing import Any

import pytest
from support.replay.scripted_run import CONFIG, ScriptedRun
from support.stores.dict_store import DictStore

from configs.requests import ReplayRequest
from millrace.errors import ReplayError
from millrace.replay.diff import diff
from millrace.replay.results import write_spec
from storage import layout
from storage.stores.base import Store
from storage.stores.factory import open_store

LAST = 5


def stored(**how: Any) -> Store:
    return ScriptedRun(DictStore(), **how).steps(1, LAST).close()


def against_the_plain_run(**how: Any) -> dict[str, Any]:
    return diff(stored(), stored(**how))


def test_equal_runs_do_not_differ() -> None:
    result = diff(stored(), stored())
    assert (result["config"], result["provenance"], result["start"]) == ([], [], [])
    assert (result["batch"], result["numbers"]) == (None, None)
    assert (result["steps"], result["checkpoints"], result["checkpoints_differing"]) == ([1, LAST], [1, 2, 3, 4, 5], [])
    assert diff(stored(), ScriptedRun(DictStore()).steps(7, 8).close())["steps"] == []


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
        ("groups", "groups", "the batch in order", [6, 7, 8], [6, 7, 1000]),
        ("order", "groups", "the batch in order", [6, 7, 8], [7, 8, 6]),
    ],
)
def test_the_first_difference_in_a_batch_is_named(change: str, what: str, where: str, a: object, b: object) -> None:
    difference = against_the_plain_run(changed={change: 3})["batch"]
    assert difference is not None
    assert (difference["step"], difference["what"], difference["where"]) == (3, what, where)
    assert (difference["a"], difference["b"]) == (a, b)


@pytest.mark.parametrize("what", ["trainer_logprobs", "loss", "grad_norm"])
def test_the_first_difference_in_the_numbers_is_named(what: str) -> None:
    result = against_the_plain_run(changed={what: 4})
    assert result["batch"] is None
    assert result["numbers"] is not None
    assert (result["numbers"]["step"], result["numbers"]["what"]) == (4, what)
    assert json.loads(json.dumps(result))["numbers"]["step"] == 4


def test_batch_and_numbers_may_differ_first_at_different_steps() -> None:
    result = against_the_plain_run(changed={"loss": 2, "tokens": 4})
    assert result["batch"] is not None
    assert result["numbers"] is not None
    assert (result["numbers"]["step"], result["batch"]["step"]) == (2, 4)


def test_the_difference_that_causes_the_others_is_named() -> None:
    changed = {"advantages": 3, "rewards": 3, "tokens": 3, "trainer_logprobs": 3}
    difference = against_the_plain_run(changed=changed)["batch"]
    assert difference is not None
    assert difference["what"] == "tokens"


def test_a_step_that_was_rolled_back_is_not_compared() -> None:
    run = ScriptedRun(DictStore()).steps(1, 2).steps(3, 4, first_group=90)
    assert diff(stored(), run.store)["batch"] is not None, "steps 3 and 4 have other groups at first"
    run.resume()
    assert diff(stored(), run.steps(3, LAST).close())["batch"] is None


def test_config_keys_that_differ_are_named() -> None:
    training = CONFIG["training"] | {"learning_rate": 0.25, "loss": {"name": "cispo"}}
    result = against_the_plain_run(config={"training": training})
    assert result["config"] == [
        {"name": "training.learning_rate", "a": 0.5, "b": 0.25},
        {"name": "training.loss.name", "a": None, "b": "cispo"},
    ]
    assert result["batch"] is result["numbers"] is None


def test_configs_are_those_at_the_first_difference() -> None:
    def run(changed: dict[str, int], last_threads: int) -> Store:
        made = ScriptedRun(DictStore(), changed=changed).steps(1, 2)
        made.resume(training=CONFIG["training"] | {"threads": 2})
        made.steps(3, 4)
        made.resume(training=CONFIG["training"] | {"threads": last_threads})
        return made.steps(5, LAST).close()

    plain = stored()
    assert diff(plain, run({"loss": 1}, 1))["config"] == []
    assert diff(plain, run({"loss": 4}, 1))["config"] == [{"name": "training.threads", "a": 1, "b": 2}]
    assert diff(plain, run({}, 7))["config"] == [{"name": "training.threads", "a": 1, "b": 7}]


def test_reward_version_start_model_and_checkpoints_are_compared() -> None:
    result = against_the_plain_run(changed={"verifier_version": 1})
    assert result["provenance"] == [{"name": "reward version", "a": "1", "b": "2"}]
    first, other = stored(), stored()
    first.put(layout.START_HASHES, json.dumps({"model.safetensors": "aa", "tokenizer.json": "cc"}).encode())
    assert diff(first, other)["start"] == []
    other.put(layout.START_HASHES, json.dumps({"model.safetensors": "bb", "tokenizer.json": "cc"}).encode())
    assert diff(first, other)["start"] == [{"name": "model.safetensors", "a": "aa", "b": "bb"}]
    assert against_the_plain_run(changed={"checkpoint": 4})["checkpoints_differing"] == [4]


def as_replay(source: str, folder: Path, *, num_sources: int = 1) -> Store:
    """A replay's own run, whose trajectories are in the source."""
    replayed = ScriptedRun(open_store(str(folder))).steps(1, LAST).close()
    for name in ("trajectories", "scores"):
        replayed.delete_tree(f"streams/{name}")
    write_spec(replayed, ReplayRequest(sources=[source] * num_sources, job="train", run_id="replay"))
    return replayed


def test_a_replay_is_compared_by_the_trajectories_of_its_source(tmp_path: Path) -> None:
    original = ScriptedRun(open_store(str(tmp_path / "original"))).steps(1, LAST).close()
    result = diff(original, as_replay(original.url, tmp_path / "replay"))
    assert (result["steps"], result["batch"], result["numbers"]) == ([1, LAST], None, None)
    with pytest.raises(ReplayError):
        diff(original, as_replay(original.url, tmp_path / "mixed", num_sources=2))
