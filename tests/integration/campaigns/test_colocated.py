"""A campaign whose trainer and generators take turns on one device ends with the weights of one without turns."""

import os
import signal

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, await_end, final_weights, send, wait_until

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS = 4
SETTINGS: dict[str, object] = {"pipeline.mode": "sync", "training.max_steps": STEPS}
IN_TURNS = {**SETTINGS, "placement.colocated": True}


@pytest.fixture(scope="module")
def apart(module_millrace: Millrace) -> bytes:
    """The final weights of the same campaign without turns."""
    module_millrace.finish("apart", **SETTINGS)
    return final_weights(module_millrace.store("apart"), STEPS)


def test_a_campaign_in_turns_ends_with_the_same_weights_byte_for_byte(millrace: Millrace, apart: bytes) -> None:
    summary = millrace.finish("turns", **IN_TURNS)
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * 16 * 8
    for stage in ("generate-0", "train-0"):
        assert {"sleep", "wake"} <= set(millrace.status_record("turns", stage)["seconds"])
    assert final_weights(millrace.store("turns"), STEPS) == apart


def test_a_generator_killed_in_its_sleep_comes_back_for_its_turn(millrace: Millrace, apart: bytes) -> None:
    process = millrace.start(*millrace.campaign("killed", **IN_TURNS))

    def asleep() -> bool:
        return (millrace.status_record("killed", "generate-0").get("asleep_since_version") or 0) >= 1

    wait_until(asleep, "the generator to sleep after version 1", every=0.005)
    killed = millrace.status_record("killed", "generate-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    await_end(process, 400).expect_success()
    assert_balanced(millrace.summary("killed"))
    assert millrace.status_record("killed", "generate-0")["pid"] != killed
    assert final_weights(millrace.store("killed"), STEPS) == apart


def test_two_generators_whose_trainer_is_killed_go_on_drain_and_are_resumed(millrace: Millrace) -> None:
    settings = {**IN_TURNS, "generation.replicas": 2}
    process = millrace.start(*millrace.campaign("two", **{**settings, "training.max_steps": 100_000}))
    millrace.wait_for_version("two", 1)
    killed = millrace.status_record("two", "train-0")["pid"]
    os.kill(killed, signal.SIGKILL)
    wait_until(lambda: millrace.status_record("two", "train-0").get("pid") != killed, "its successor")
    millrace.wait_for_version("two", 4)
    ended = send(process, signal.SIGTERM)
    assert ended.code == 143, ended.output
    stopped = millrace.status("two")
    assert_balanced(stopped)
    steps = stopped["steps"] + 2
    assert millrace.finish("two", "--resume", **{**settings, "training.max_steps": steps})["steps"] == steps
