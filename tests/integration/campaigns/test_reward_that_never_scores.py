"""A campaign whose reward fails for every response: it ends, and says why."""

import pytest
from support.campaigns.campaigns import Millrace

pytestmark = [pytest.mark.campaign, pytest.mark.extended]


def test_a_campaign_whose_reward_never_scores_ends_with_one_line_and_code_2(millrace: Millrace) -> None:
    settings: dict[str, object] = {
        "pipeline.mode": "sync",
        "scoring.replicas": 2,
        "scoring.reward": "tests.support.rewards.own_rewards:without_result",
    }
    ended = millrace.run(*millrace.campaign("failing", **settings))
    assert ended.code == 2, ended.output
    assert "Traceback" not in ended.output
    [line] = [line for line in ended.output.splitlines() if line.startswith("millrace: ")]
    assert "scoring.reward is tests.support.rewards.own_rewards:without_result" in line
    assert "reward is of type NoneType" in line
    assert "failed for a response to prompt" in ended.output, "the first error, at once"
    status = millrace.run("status", str(millrace.root / "failing"))
    assert "responses got no score" in status.output
