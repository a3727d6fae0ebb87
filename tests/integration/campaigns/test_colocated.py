"""A campaign whose trainer and generators take turns on one device ends as one in which nobody waits for a turn."""

import os
import signal

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, await_end, send, wait_until

from storage.checkpoints import load_file, read_latest
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS = 4
SETTINGS: dict[str, object] = {"pipeline.mode": "sync", "training.max_steps": STEPS}
IN_TURNS = {**SETTINGS, "placement.colocated": True}


def final_weights(millrace: Millrace, run_id: str) -> bytes:
    store = open_store(str(millrace.root / run_id))
    checkpoint = read_latest(store)
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    return load_file(store, checkpoint.files["model.safetensors"])


@pytest.fixture(scope="module")
def apart(tmp_path_factory: pytest.TempPathFactory, environment: dict[str, str], prefect_api: str) -> bytes:
    """The final weights of the same campaign without turns."""
    millrace = Millrace(tmp_path_factory.mktemp("runs"), {**environment, "PREFECT_API_URL": prefect_api})
    ended = millrace.run(*millrace.campaign("apart", **SETTINGS))
    assert ended.code == 0, ended.output
    return final_weights(millrace, "apart")


def test_a_campaign_in_turns_ends_with_the_same_weights_byte_for_byte(millrace: Millrace, apart: bytes) -> None:
    ended = millrace.run(*millrace.campaign("turns", **IN_TURNS))
    assert ended.code == 0, ended.output
    summary = millrace.summary("turns")
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * 16 * 8
    for stage in ("generate-0", "train-0"):
        seconds = millrace.status_record("turns", stage)["seconds"]
        assert {"sleep", "wake"} <= set(seconds)
    assert final_weights(millrace, "turns") == apart


def test_a_generator_that_is_killed_in_its_sleep_comes_back_for_its_turn(millrace: Millrace, apart: bytes) -> None:
    process = millrace.start(*millrace.campaign("killed", **IN_TURNS))

    def asleep() -> bool:
        life = millrace.status_record("killed", "generate-0")
        return (life.get("asleep_since_version") or 0) >= 1

    wait_until(asleep, "the generator to sleep after version 1", every=0.005)
    killed = millrace.status_record("killed", "generate-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    ended = await_end(process, 400)
    assert ended.code == 0, ended.output
    assert_balanced(millrace.summary("killed"))
    assert millrace.status_record("killed", "generate-0")["pid"] != killed
    assert final_weights(millrace, "killed") == apart


def test_two_generators_whose_trainer_is_killed_go_on_in_turns_drain_and_are_resumed(millrace: Millrace) -> None:
    settings = {**IN_TURNS, "generation.replicas": 2}
    process = millrace.start(*millrace.campaign("two", **{**settings, "training.max_steps": 100_000}))

    def trained(step: int, but: int) -> bool:
        life = millrace.status_record("two", "train-0")
        return life.get("pid") != but and life.get("policy_version", 0) >= step

    wait_until(lambda: trained(1, but=0), "a step")
    killed = millrace.status_record("two", "train-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: trained(4, but=killed), "steps of its successor")
    ended = send(process, signal.SIGTERM)
    assert ended.code == 143, ended.output
    stopped = millrace.status("two")
    assert_balanced(stopped)
    ended = millrace.run(
        *millrace.campaign("two", "--resume", **{**settings, "training.max_steps": stopped["steps"] + 2})
    )
    assert ended.code == 0, ended.output
    assert_balanced(millrace.summary("two"))
    assert millrace.summary("two")["steps"] == stopped["steps"] + 2
