"""Campaigns that select what is asked and trained: groups without spread are replaced, and nothing stalls."""

import os
import signal

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, await_end, wait_until

from millrace.prompts.curriculum import read_block
from millrace.replay.verify import verify
from storage.checkpoints import load_file, read_latest
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS = 5
SETTINGS: dict[str, object] = {
    "training.max_steps": STEPS,
    "training.checkpoint_every": 2,
    "training.selection.drop_zero_advantage": True,
    "training.selection.truncated": "mask",
    # This model solves nothing: a group of two has spread if one of them was cut off.
    "generation.group_size": 2,
    "training.selection.overlong_buffer": 1,
    # So few prompts that each is asked again, some before what they earned is known.
    "prompts.digits": 1,
    "prompts.num_eval": 40,
    "prompts.curriculum_window": 1,
}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_without_spread_are_replaced_and_every_step_is_replayed_bit_for_bit(
    millrace: Millrace, mode: str
) -> None:
    ended = millrace.run(*millrace.campaign(mode, **{**SETTINGS, "pipeline.mode": mode}))
    assert ended.code == 0, ended.output
    summary = millrace.summary(mode)
    assert_balanced(summary)
    assert summary["ledger"]["dropped"]["zero_advantage"]["rollouts"] > 0, "witness"
    assert 0 < summary["zero_advantage_share"] < 1
    assert summary["curriculum"]["hard"] > 0
    verdict = verify(open_store(str(millrace.root / mode)))
    assert (verdict.difference, verdict.steps) == (None, STEPS)


def test_in_sync_mode_a_trainer_that_was_killed_leaves_no_trace_in_the_final_weights(millrace: Millrace) -> None:
    weights, orders = [], []
    for run_id in ("undisturbed", "killed"):
        process = millrace.start(*millrace.campaign(run_id, **{**SETTINGS, "pipeline.mode": "sync"}))
        if run_id == "killed":
            wait_until(lambda: millrace.status_record("killed", "train-0").get("policy_version", 0) >= 3, "a step")
            os.kill(millrace.status_record("killed", "train-0")["pid"], signal.SIGKILL)
        ended = await_end(process, 400)
        assert ended.code == 0, ended.output
        assert_balanced(millrace.summary(run_id))
        store = open_store(str(millrace.root / run_id))
        checkpoint = read_latest(store)
        assert checkpoint is not None
        assert checkpoint.step == STEPS
        weights.append(load_file(store, checkpoint.files["model.safetensors"]))
        orders.append([block.prompts for n in range(STEPS) if (block := read_block(store, n)) is not None])
    assert orders[0] == orders[1]
    assert weights[0] == weights[1]
