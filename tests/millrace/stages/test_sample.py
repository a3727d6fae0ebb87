"""`millrace run --check` shows sampled answers of the start model with their rewards."""

from pathlib import Path

import pytest
from support.campaigns.campaigns import start_model

from configs.load import PRESETS, load_config
from millrace.stages.sample import NUM_ANSWERS, NUM_PROMPTS, sample


@pytest.mark.slow
def test_three_prompts_have_three_rewarded_answers_and_a_reward_that_raises_is_named(tmp_path: Path) -> None:
    settings = [f"model.path={start_model()}", f"storage.root={tmp_path}"]
    sampled = sample(load_config(PRESETS / "tiny-cpu.yaml", settings).model_dump(mode="json"))
    assert [len(shown["answers"]) for shown in sampled["prompts"]] == [NUM_ANSWERS] * NUM_PROMPTS
    assert {reward for shown in sampled["prompts"] for _, reward in shown["answers"]} <= {0.0, 1.0}
    assert sampled["failure"] is None
    failing = load_config(
        PRESETS / "tiny-cpu.yaml", [*settings, "scoring.reward=tests.support.rewards.own_rewards:without_result"]
    )
    unscored = sample(failing.model_dump(mode="json"))
    assert {reward for shown in unscored["prompts"] for _, reward in shown["answers"]} == {None}
    assert "without_result" in unscored["failure"]
