"""A campaign whose learning rate grows tenfold: noticed, rolled back, and no accuracy is lost."""

from typing import Any

import pytest
from support.campaigns.campaigns import Millrace

from millrace.runs.decisions import ROLL_BACK, read_decisions
from millrace.runs.record import latest_attempt, resume_run

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


def test_a_learning_rate_ten_times_too_high_is_noticed_and_costs_no_accuracy(millrace: Millrace) -> None:
    def run(run_id: str, rate: float, *flags: str, **settings: object) -> dict[str, Any]:
        return millrace.finish(run_id, *flags, **{**SETTINGS, "training.learning_rate": rate, **settings})

    calm = run("calm", RATE)
    assert calm["eval"]["end"]["policy_version"] == STEPS
    before = run("steep", RATE, **{"budget.max_steps": DISTURBED_AT})["eval"]["end"]["accuracy"]
    assert before < calm["eval"]["end"]["accuracy"] - APART, "witness: there is something left to learn"
    # A resume may not change the rate, so an attempt that has changed it is put between.
    store = millrace.store("steep")
    config = latest_attempt(store).config
    config["training"]["learning_rate"] = 10 * RATE
    resume_run(store, config)
    steep = run("steep", 10 * RATE, "--resume")

    accuracy = {name: summary["eval"]["end"]["accuracy"] for name, summary in (("calm", calm), ("steep", steep))}
    print(f"at {DISTURBED_AT} {before:.4f}, at {STEPS} {accuracy}")
    (rollback,) = (decision for decision in read_decisions(store) if decision.action == ROLL_BACK)
    print(f"{rollback.change}: {rollback.reason}")
    noticed = int(rollback.reason.removeprefix("version ").partition(":")[0])
    assert noticed <= DISTURBED_AT + NOTICED_WITHIN
    assert rollback.policy_version == DISTURBED_AT
    assert rollback.measured["rate_factor"] == pytest.approx(0.1)
    assert steep["incidents"]["counts"]["training.collapsed"] == 1
    assert steep["steps"] == STEPS
    assert steep["ledger"]["trained"]["rollouts"] == STEPS * 32 * 8
    assert steep["ledger"]["dropped"]["rolled_back"]["rollouts"] > 0
    assert abs(accuracy["steep"] - accuracy["calm"]) <= APART
    millrace.run("fsck", str(millrace.root / "steep")).expect_success()
