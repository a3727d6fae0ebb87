"""A campaign whose learning rate becomes ten times what it was: noticed, rolled back, and learned as if it had not."""

from typing import Any

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced

from millrace.runs.decisions import ROLL_BACK, StoredDecision, read_decisions
from millrace.runs.record import latest_attempt, resume_run
from storage.stores.factory import open_store

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS, DISTURBED_AT, NOTICED_WITHIN, APART = 160, 60, 20, 0.03
RATE = 4e-4
SETTINGS: dict[str, object] = {
    "model.path": None,
    "model.warm_start_steps": 2000,
    "prompts.num_eval": 2048,
    "training.max_steps": STEPS,
    "training.groups_per_step": 32,
    "training.checkpoint_every": 10,
    "training.on_collapse": "roll_back",
    "generation.groups_per_batch": 16,
}


def test_a_learning_rate_that_is_ten_times_too_high_is_noticed_and_costs_no_accuracy(millrace: Millrace) -> None:
    calm = run(millrace, "calm", RATE)
    assert calm["eval"]["end"]["policy_version"] == STEPS
    before = run(millrace, "steep", RATE, **{"budget.max_steps": DISTURBED_AT})["eval"]["end"]["accuracy"]
    assert before < calm["eval"]["end"]["accuracy"] - APART, "witness: there is something left to learn"
    # A resume may not change the rate, so an attempt that has changed it is put between.
    store = open_store(str(millrace.root / "steep"))
    config = latest_attempt(store).config
    config["training"]["learning_rate"] = 10 * RATE
    resume_run(store, config)
    steep = run(millrace, "steep", 10 * RATE, "--resume")

    rollbacks = [one for one in read_decisions(store) if one.action == ROLL_BACK]
    ended = {name: summary["eval"]["end"]["accuracy"] for name, summary in (("calm", calm), ("steep", steep))}
    print(f"at {DISTURBED_AT} {before:.4f}, at {STEPS} {ended}; rollbacks: {[told(one) for one in rollbacks]}")
    [rollback] = rollbacks
    noticed = int(rollback.reason.removeprefix("version ").partition(":")[0])
    assert noticed <= DISTURBED_AT + NOTICED_WITHIN
    assert rollback.policy_version == DISTURBED_AT
    assert rollback.measured["rate_factor"] == pytest.approx(0.1)
    assert steep["incidents"]["counts"]["training.collapsed"] == 1
    assert_balanced(steep)
    assert steep["steps"] == STEPS
    assert steep["ledger"]["trained"]["rollouts"] == STEPS * 32 * 8
    assert steep["ledger"]["dropped"]["rolled_back"]["rollouts"] > 0
    assert abs(ended["steep"] - ended["calm"]) <= APART
    checked = millrace.run("fsck", str(millrace.root / "steep"))
    assert checked.code == 0, checked.output


def run(millrace: Millrace, run_id: str, rate: float, *flags: str, **settings: object) -> dict[str, Any]:
    """The summary of the campaign, once it has ended."""
    chosen = {**SETTINGS, "training.learning_rate": rate, **settings}
    ended = millrace.run(*millrace.campaign(run_id, *flags, **chosen))
    assert ended.code == 0, ended.output
    return millrace.summary(run_id)


def told(rollback: StoredDecision) -> str:
    return f"{rollback.change}: {rollback.reason}"
