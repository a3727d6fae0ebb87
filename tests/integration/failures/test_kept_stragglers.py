"""A campaign in which a group comes later than the bound allows, and is trained whole."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace, await_end, wait_until

from millrace.replay.verify import verify

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS, BOUND = 6, 1
SETTINGS: dict[str, object] = {
    "training.max_steps": STEPS,
    "training.groups_per_step": 3,
    "staleness.max_staleness": BOUND,
    "staleness.too_old": "keep",
    "generation.replicas": 3,
    "generation.groups_per_batch": 2,
    "prompts.num_eval": 4,
}
STRAGGLER, FIRST_STEP = "generate-1 generate.before_commit 1 hang", "train-0 train.mid_step 1 hang"


def test_a_group_beyond_the_bound_is_trained_whole_and_replayed_bit_for_bit(millrace: Millrace, tmp_path: Path) -> None:
    armed = millrace.arm(tmp_path / "fired", STRAGGLER, FIRST_STEP)
    process = millrace.start(*millrace.campaign("kept", **SETTINGS))
    # A group of version 0 is held back until the other generators' groups have made BOUND + 1 steps.
    wait_until(lambda: armed.has_fired(STRAGGLER) and armed.has_fired(FIRST_STEP), "both are held")
    armed.release(FIRST_STEP)
    millrace.wait_for_version("kept", BOUND + 1)
    armed.release(STRAGGLER)
    await_end(process, 400).expect_success()

    summary = millrace.summary("kept")
    staleness = summary["staleness"]
    assert staleness["max"] > BOUND >= staleness["mean"]
    assert summary["ledger"]["dropped"] == {}
    assert summary["trained_to_taken"]["length"] == 1.0
    url = str(millrace.root / "kept")
    assert f"max {staleness['max']}, admitted within {BOUND}" in millrace.run("status", url).expect_success()
    assert "0 damaged" in millrace.run("fsck", url).expect_success()
    verdict = verify(millrace.store("kept"))
    assert (verdict.difference, len(verdict.passed)) == (None, STEPS)
