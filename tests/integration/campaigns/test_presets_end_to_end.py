"""The presets with real data, cut to a few steps: problems made by a package, and a file in the shape of GSM8K."""

import importlib.util
import json

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced
from support.streams.rows import read_rows

from storage import layout
from storage.schema import SCORE, TRAJECTORY

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

FEW_STEPS = {
    "model.bootstrap.max_steps": 20,
    "training.max_steps": 4,
    "training.checkpoint_every": 2,
    "training.groups_per_step": 8,
    "generation.groups_per_batch": 4,
    "evaluation.num_prompts": 12,
    "evaluation.samples": 2,
}


@pytest.mark.parametrize(
    ("preset", "package", "reward", "source"),
    [
        ("gsm8k-cpu", "math_verify", "math", "gsm8k-tiny.jsonl"),
        ("reasoning-gym-cpu", "reasoning_gym", "reasoning_gym", "reasoning_gym:chain_sum {"),
    ],
)
def test_a_preset_with_real_data_finishes_and_accounts_for_every_rollout(
    millrace_alone: Millrace, preset: str, package: str, reward: str, source: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    sets = [f"{key}={value}" for key, value in FEW_STEPS.items()]
    path = str(REPOSITORY / "configs" / "presets" / f"{preset}.yaml")
    arguments = ["run", path, "--root", str(millrace_alone.root), "--run-id", preset, "--set", *sets]
    output = millrace_alone.run(*arguments).expect_success()
    summary = millrace_alone.summary(preset)
    assert (summary["state"], summary["steps"]) == ("finished", 4)
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 4 * 8 * 8

    store = millrace_alone.store(preset)
    scores = read_rows(store, layout.scores(reward, 0, 0, 1), SCORE)
    assert {score["status"] for score in scores} == {"ok"}, "every response was judged"
    rollouts = read_rows(store, layout.trajectories(0), TRAJECTORY)
    assert all(json.loads(row["meta"])["source"].startswith(source) for row in rollouts)

    for result in summary["eval"].values():
        low, high = result["accuracy_interval"]
        assert 0 <= low <= result["accuracy"] <= high <= 1
        assert (result["prompts"], result["samples"], result["errors"], result["sample_errors"]) == (12, 2, 0, 0)
        assert set(result["pass_at"]) == {"1", "2"}
        assert result["pass_at"]["1"]["value"] <= result["pass_at"]["2"]["value"]
    assert "sampled, version " in output
