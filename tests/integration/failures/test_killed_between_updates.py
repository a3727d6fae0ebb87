"""A campaign whose trainer is killed between two updates on the same batch: the batch is trained once, and whole."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace, final_weights

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS, ROLLOUTS_PER_STEP = 4, 16 * 8
SETTINGS: dict[str, object] = {
    "pipeline.mode": "sync",
    "training.max_steps": STEPS,
    "training.minibatches": 2,
    "training.epochs": 2,
    "training.loss": "decoupled_ppo",
    "training.entropy_coefficient": 0.001,
    "training.frozen_layers": 1,
    "training.schedule.decay": "cosine",
    "training.schedule.warmup_steps": 1,
    "training.schedule.steps": STEPS,
}
IN_SECOND_EPOCHS = ("train-0 train.mid_step 4 kill", "train-0 train.mid_step 11 kill")
"""A step passes the place four times: the fourth time is in the first step's second epoch, and the eleventh time after
that in the second epoch of the third step."""


def test_a_trainer_killed_in_a_second_epoch_ends_with_the_same_weights(millrace: Millrace, tmp_path: Path) -> None:
    millrace.finish("calm", **SETTINGS)
    armed = millrace.arm(tmp_path / "fired", *IN_SECOND_EPOCHS)
    summary = millrace.finish("wounded", **SETTINGS)
    assert armed.missed() == []
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * ROLLOUTS_PER_STEP
    assert final_weights(millrace.store("wounded"), STEPS) == final_weights(millrace.store("calm"), STEPS)
    verified = millrace.run("replay", str(millrace.root / "wounded"), "--root", str(millrace.root), "--verify")
    assert "the same bit for bit" in verified.expect_success()
