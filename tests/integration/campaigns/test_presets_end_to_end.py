"""The presets with real data, cut to a few steps: problems made by a package, and a file in the shape of GSM8K."""

import importlib.util
import json

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced

from storage import layout
from storage.schema import SCORE, TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign

FEW_STEPS = {
    "model.warm_start_steps": 20,
    "training.max_steps": 4,
    "training.checkpoint_every": 2,
    "training.groups_per_step": 8,
    "generation.groups_per_batch": 4,
    "prompts.num_eval": 12,
    "evaluation.samples": 2,
}


@pytest.mark.extended
@pytest.mark.parametrize(
    ("preset", "package", "reward", "source"),
    [
        ("gsm8k-cpu", "math_verify", "math", "gsm8k-tiny.jsonl"),
        pytest.param(
            *("reasoning-gym-cpu", "reasoning_gym", "reasoning_gym", "reasoning_gym:chain_sum {"),
            marks=pytest.mark.extended,
        ),
    ],
)
def test_a_preset_with_real_data_runs_to_its_end_and_accounts_for_every_rollout(
    millrace_alone: Millrace, preset: str, package: str, reward: str, source: str
) -> None:
    if importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed")
    sets = [part for key, value in FEW_STEPS.items() for part in ("--set", f"{key}={value}")]
    path = str(REPOSITORY / "configs" / "presets" / f"{preset}.yaml")
    ended = millrace_alone.run("run", path, "--root", str(millrace_alone.root), "--run-id", preset, *sets)
    assert ended.code == 0, ended.output
    summary = millrace_alone.summary(preset)
    assert (summary["state"], summary["steps"]) == ("finished", 4)
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 4 * 8 * 8

    store = open_store(str(millrace_alone.root / preset))
    scores = StreamReader(store, layout.scores(reward, 0, 0, 1), SCORE).next()
    assert scores is not None
    assert set(scores.table["status"].to_pylist()) == {"ok"}, "every response was judged"
    rollouts = StreamReader(store, layout.trajectories(0), TRAJECTORY).next()
    assert rollouts is not None
    assert all(json.loads(meta)["source"].startswith(source) for meta in rollouts.table["meta"].to_pylist())

    for result in summary["eval"].values():
        low, high = result["accuracy_interval"]
        assert 0 <= low <= result["accuracy"] <= high <= 1
        assert (result["prompts"], result["samples"], result["errors"], result["sample_errors"]) == (12, 2, 0, 0)
        assert set(result["pass_at"]) == {"1", "2"}
        assert result["pass_at"]["1"]["value"] <= result["pass_at"]["2"]["value"]
    assert "sampled, version " in ended.output
