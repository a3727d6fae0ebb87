"""Presets with real data, cut to a few steps, and evaluations while a campaign trains."""

import importlib.util
import json
from collections import Counter
from pathlib import Path

import pytest
from support.campaigns.campaigns import REPOSITORY, Millrace, assert_balanced
from support.streams.rows import read_rows

from millrace.evaluation.answers import read_answers
from millrace.evaluation.results import ResultsReader, measures_by_set
from millrace.training.checkpoints.names import weights_checksum
from storage import layout
from storage.checkpoints import stored_checkpoints
from storage.schema import SCORE, TRAJECTORY

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

FEW_STEPS = {
    "model.warm_start_steps": 20,
    "training.max_steps": 4,
    "training.checkpoint_every": 2,
    "training.groups_per_step": 8,
    "generation.groups_per_batch": 4,
    "prompts.num_eval": 12,
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
    scores = read_rows(store, layout.annotations(f"scores/{reward}", 0, 0, 1), SCORE)
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


def test_versions_are_evaluated_during_training_which_ends_when_none_is_better(
    millrace: Millrace, tmp_path: Path
) -> None:
    easy = tmp_path / "easy.jsonl"
    easy.write_text("".join(f'{{"prompt": "0{n}+00=", "answer": "0{n}"}}\n' for n in range(10)))
    settings = {
        "training.max_steps": 1000,
        # So slow that no answer changes.
        "training.learning_rate": 1e-12,
        "training.checkpoint_every": 1000,
        "evaluation.every": 2,
        "evaluation.stop_after": 2,
        "evaluation.sets.easy.source": str(easy),
        "evaluation.sets.easy.num_prompts": 6,
        "evaluation.sets.easy.samples": 2,
    }
    summary = millrace.finish("watched", **settings)
    assert (summary["state"], summary["attempt"]) == ("finished", 0)
    assert 4 <= summary["steps"] < 1000
    assert "evaluation.stop_after is 2" in summary["early_stop"]

    store = millrace.store("watched")
    checkpoints = stored_checkpoints(store)
    start, *results = ResultsReader(store).read()
    assert (start["policy_version"], start["weights_checksum"]) == (0, None)
    assert len(results) >= 2
    *during, last = [result["policy_version"] for result in results]
    assert last == summary["steps"]
    assert all(version % 2 == 0 for version in during)
    for result in results:
        assert result["weights_checksum"] == weights_checksum(checkpoints[result["policy_version"]])
    for result in (start, *results):
        sets = measures_by_set(result)
        assert {name: measures["prompts"] for name, measures in sets.items()} == {"held_out": 32, "easy": 6}
        assert sets["easy"]["pass_at"].keys() == {"1", "2"}
        answers = read_answers(store, result)
        assert answers is not None
        assert Counter(zip(answers["set"].to_pylist(), map(len, answers["rewards"].to_pylist()), strict=True)) == {
            ("held_out", 1): 32,
            ("easy", 3): 6,
        }
    assert set(range(2, last, 2)) <= checkpoints.keys(), "each version that fell due was checkpointed"
