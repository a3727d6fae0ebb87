"""A campaign whose learning rate becomes ten times what it was: noticed, rolled back, and learned to the end."""

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced

from millrace.control.decisions import ROLL_BACK
from millrace.runs.decisions import read_decisions
from millrace.runs.record import latest_attempt, resume_run
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS, DISTURBED_AT, NOTICED_WITHIN = 160, 60, 60
RATE = 4e-4
SETTINGS: dict[str, object] = {
    "model.path": None,
    "model.bootstrap.max_steps": 2000,
    "training.max_steps": STEPS,
    "training.groups_per_step": 32,
    "training.checkpoint_every": 10,
    "training.on_collapse": "roll_back",
    "generation.groups_per_batch": 16,
    "evaluation.num_prompts": 512,
}


def test_a_learning_rate_that_is_ten_times_too_high_is_noticed_and_the_run_goes_back_and_learns(
    millrace: Millrace,
) -> None:
    window = {"training.learning_rate": RATE, "budget.max_steps": DISTURBED_AT}
    ended = millrace.run(*millrace.campaign("steep", **SETTINGS, **window))
    assert ended.code == 0, ended.output
    calm = millrace.summary("steep")["eval"]["end"]["accuracy"]
    # A resume may not change the rate, so an attempt that has changed it is put between.
    store = open_store(str(millrace.root / "steep"))
    config = latest_attempt(store).config
    config["training"]["learning_rate"] = 10 * RATE
    resume_run(store, config)
    ended = millrace.run(*millrace.campaign("steep", "--resume", **SETTINGS, **{"training.learning_rate": 10 * RATE}))
    assert ended.code == 0, ended.output

    summary = millrace.summary("steep")
    rollbacks = [one for one in read_decisions(store) if one.action == ROLL_BACK]
    assert 1 <= len(rollbacks) <= 3
    noticed = int(rollbacks[0].reason.removeprefix("version ").partition(":")[0])
    print(f"noticed after {noticed - DISTURBED_AT} steps, {len(rollbacks)} rollbacks, to {summary['eval']['end']}")
    assert noticed <= DISTURBED_AT + NOTICED_WITHIN
    assert summary["incidents"]["counts"]["training.collapsed"] == len(rollbacks)
    assert_balanced(summary)
    assert summary["steps"] == STEPS
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * 32 * 8
    assert summary["ledger"]["dropped"]["rolled_back"]["rollouts"] > 0
    assert summary["eval"]["end"]["accuracy"] > calm, "after the rollback it goes on learning"
    ended = millrace.run("fsck", str(millrace.root / "steep"))
    assert ended.code == 0, ended.output
