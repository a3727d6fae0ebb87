"""A campaign whose trainer is killed between two updates on the same batch: the batch is trained once, and whole."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.stages.failpoints import Failpoints

from storage.checkpoints import load_file, read_latest
from storage.failpoints import FIRED, SPECS
from storage.stores.factory import open_store

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


def final_weights(millrace: Millrace, run_id: str) -> bytes:
    store = open_store(str(millrace.root / run_id))
    checkpoint = read_latest(store)
    assert checkpoint is not None
    assert checkpoint.step == STEPS
    return load_file(store, checkpoint.files["model.safetensors"])


def test_killed_in_a_second_epoch_a_trainer_repeats_the_batch_and_ends_with_the_same_weights(
    millrace: Millrace, tmp_path: Path
) -> None:
    ended = millrace.run(*millrace.campaign("calm", **SETTINGS))
    assert ended.code == 0, ended.output
    armed = Failpoints(tmp_path / "fired", *IN_SECOND_EPOCHS)
    environment = armed.environment()
    millrace.environment |= {name: environment[name] for name in (SPECS, FIRED)}
    ended = millrace.run(*millrace.campaign("wounded", **SETTINGS))
    assert ended.code == 0, ended.output
    assert armed.missed() == []
    summary = millrace.summary("wounded")
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * ROLLOUTS_PER_STEP
    assert final_weights(millrace, "wounded") == final_weights(millrace, "calm")
    ended = millrace.run("replay", str(millrace.root / "wounded"), "--root", str(millrace.root), "--verify")
    assert ended.code == 0, ended.output
    assert "the same bit for bit" in ended.output
