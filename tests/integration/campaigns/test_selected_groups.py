"""Campaigns that select prompts and groups: groups without spread are replaced, and nothing stalls."""

import os
import signal

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, await_end, final_weights

from millrace.prompts.blocks import read_block
from millrace.replay.verify import verify

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
    # With few prompts each is used again, some before their rewards are known.
    "prompts.digits": 1,
    "prompts.num_eval": 40,
    "prompts.curriculum_window": 1,
}


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_groups_without_spread_are_replaced_and_every_step_is_replayed_bit_for_bit(
    millrace: Millrace, mode: str
) -> None:
    summary = millrace.finish(mode, **{**SETTINGS, "pipeline.mode": mode})
    assert summary["ledger"]["dropped"]["zero_advantage"]["rollouts"] > 0, "witness"
    assert 0 < summary["zero_advantage_share"] < 1
    assert summary["curriculum"]["hard"] > 0
    verdict = verify(millrace.store(mode))
    assert (verdict.difference, len(verdict.passed)) == (None, STEPS)


def test_in_sync_mode_a_killed_trainer_leaves_no_trace_in_the_final_weights(millrace: Millrace) -> None:
    weights, orders = [], []
    for run_id in ("undisturbed", "killed"):
        process = millrace.start(*millrace.campaign(run_id, **{**SETTINGS, "pipeline.mode": "sync"}))
        if run_id == "killed":
            millrace.wait_for_version("killed", 3)
            os.kill(millrace.status_record("killed", "train-0")["pid"], signal.SIGKILL)
        await_end(process, 400).expect_success()
        assert_balanced(millrace.summary(run_id))
        store = millrace.store(run_id)
        weights.append(final_weights(store, STEPS))
        orders.append([block.sources for n in range(STEPS) if (block := read_block(store, n)) is not None])
    assert orders[0] == orders[1]
    assert weights[0] == weights[1]
