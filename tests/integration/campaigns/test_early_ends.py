"""Campaigns that end early: attempts with a budget, and a reward that fails for every response."""

import json

import pytest
from support.campaigns.campaigns import Millrace, assert_balanced, stages_of

from storage import layout

pytestmark = pytest.mark.campaign


@pytest.mark.extended
def test_each_attempt_takes_the_steps_of_its_budget_and_the_last_finishes_the_run(millrace: Millrace) -> None:
    def attempt() -> str:
        return millrace.run(*millrace.campaign("nights", "--resume", "latest", **settings)).expect_success()

    settings = {"budget.max_steps": 4, "training.max_steps": 6, "staleness.too_old": "mask"}
    assert "budget is spent" in attempt()
    summary = millrace.summary("nights")
    assert (summary["state"], summary["steps"], summary["eval"]["end"]["policy_version"]) == ("stopped", 4, 4)

    # A power cut has torn the result of the start model. It is evaluated again.
    start = millrace.root / "nights" / layout.evaluation(0)
    start.write_bytes(start.read_bytes()[:30])

    settings["staleness.too_old"] = "drop"
    changed = 'staleness.too_old was "mask" and is "drop"'
    assert f"resumed with another setting: {changed}" in attempt()
    assert changed in (millrace.root / "nights" / "reports" / "0001.md").read_text()
    summary = millrace.summary("nights")
    assert (summary["state"], summary["steps"], summary["attempt"]) == ("finished", 6, 1)
    assert summary["eval"]["end"]["policy_version"] == 6
    assert summary["eval"]["start"] == json.loads(start.read_bytes())
    assert_balanced(summary)

    attempt()
    assert millrace.summary("nights")["steps"] == 6


@pytest.mark.faults
def test_when_the_time_is_up_stages_drain_and_training_is_kept_and_evaluated(millrace: Millrace) -> None:
    # The time of the second one does not go into making the start model.
    for budget in ({"budget.max_steps": 2}, {"budget.duration_minutes": 0.75}):
        summary = millrace.finish("hour", "--resume", "latest", **{"training.max_steps": 100_000, **budget})
    assert summary["state"] == "stopped"
    assert 2 < summary["steps"] < 100_000
    assert summary["eval"]["end"]["policy_version"] == summary["steps"]
    assert stages_of(millrace.root / "hour") == []
    record = json.loads((millrace.root / "hour" / "attempts" / "0001.ended").read_text())
    assert record["state"] == "stopped"


@pytest.mark.extended
def test_a_campaign_whose_reward_never_scores_ends_with_one_line_and_code_2(millrace: Millrace) -> None:
    settings: dict[str, object] = {
        "pipeline.mode": "sync",
        "scoring.replicas": 2,
        "scoring.reward": "tests.support.rewards.own_rewards:without_result",
    }
    ended = millrace.run(*millrace.campaign("failing", **settings))
    line = ended.expect_refusal()
    assert line.startswith("millrace: ")
    assert "scoring.reward is tests.support.rewards.own_rewards:without_result" in line
    assert "reward is None" in line
    assert "failed for a response to prompt" in ended.output, "the first error, at once"
    status = millrace.run("status", str(millrace.root / "failing"))
    assert "responses got no score" in status.output
