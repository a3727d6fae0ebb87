"""Whole campaigns: four stage processes, joined by streams."""

from pathlib import Path

import numpy as np
import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced, final_weights, stages_of, start_model
from support.streams.rows import read_rows
from support.training.router_mismatch import EXPERTS, LAYERS, K, mixture

from millrace.bootstrap.tiny_model import character_tokenizer
from storage import layout
from storage.schema import METRIC, SCORE, TRAJECTORY
from storage.stores.base import Store

pytestmark = pytest.mark.campaign

TRAJECTORIES = layout.trajectories(0)


def trainer_metrics(store: Store) -> dict[str, list[float]]:
    metrics: dict[str, list[float]] = {}
    for row in read_rows(store, layout.metrics("train", 0), METRIC):
        metrics.setdefault(row["name"], []).append(row["value"])
    return metrics


@pytest.mark.smoke
def test_a_campaign_without_a_prefect_server_finishes_and_accounts_for_every_rollout(millrace_alone: Millrace) -> None:
    output = millrace_alone.run(*millrace_alone.campaign("first", **FROM_SCRATCH)).expect_success()
    assert "accuracy, version 6" in output
    summary = millrace_alone.summary("first")
    assert summary["state"] == "finished"
    assert summary["steps"] == 6
    assert set(summary["stage_pids"]) == {"generate-0", "score-0", "train-0", "sync_weights-0"}
    assert len(set(summary["stage_pids"].values())) == 4
    assert stages_of(millrace_alone.root / "first") == []
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 6 * 16 * 8
    assert len(summary["staleness"]["histogram"]) > 1
    assert 0 < summary["staleness"]["mean"] <= summary["staleness"]["bound"] == 2
    assert summary["weight_sync"]["count"] > 1
    assert summary["weight_sync"]["bytes"] > 0
    assert set(summary["eval"]) == {"start", "end"}
    assert millrace_alone.status("first") == summary


@pytest.mark.extended
def test_two_generators_and_two_scorers_share_the_work_and_make_no_group_twice(millrace: Millrace) -> None:
    settings = {"generation.replicas": 2, "scoring.replicas": 2, "weights.transport": "direct"}
    summary = millrace.finish("wide", **settings)
    assert summary["policy_versions_used"] > 1
    assert summary["weight_sync"]["transport"] == "direct"
    store = millrace.store("wide")
    for generator in (0, 1):
        rows = read_rows(store, layout.trajectories(generator), TRAJECTORY)
        assert {row["group_id"] % 2 for row in rows} == {generator}
        for scorer in (0, 1):
            assert read_rows(store, layout.annotations("scores/exact_match", generator, scorer, 2), SCORE)


@pytest.mark.extended
def test_sync_mode_is_on_policy_and_ends_in_the_same_weights_each_time(millrace: Millrace) -> None:
    for run_id in ("one", "two"):
        summary = millrace.finish(run_id, **{"pipeline.mode": "sync", "training.max_steps": 3})
        assert set(summary["staleness"]["histogram"]) == {"0"}
    assert final_weights(millrace.store("one")) == final_weights(millrace.store("two"))


@pytest.mark.extended
def test_a_half_precision_mixture_is_trained_through_the_experts_that_generated(
    millrace: Millrace, tmp_path: Path
) -> None:
    mixture(seed=0).save_pretrained(tmp_path)
    character_tokenizer(["0123456789+="]).save_pretrained(tmp_path)
    settings = {
        "model.path": str(tmp_path),
        "pipeline.mode": "sync",
        "generation.dtype": "bfloat16",
        "generation.max_new_tokens": 16,
        "training.max_steps": 3,
    }
    for run_id, replays in (("off", False), ("on", True)):
        millrace.finish(run_id, **settings, **{"training.router_replay": replays})
    off, on = millrace.store("off"), millrace.store("on")
    ratio_off, ratio_on = (max(trainer_metrics(store)["importance_ratio_max"]) for store in (off, on))
    assert ratio_on - 1 < (ratio_off - 1) / 2
    assert not any(row["routed_experts"] for row in read_rows(off, TRAJECTORIES, TRAJECTORY))
    for row in read_rows(on, TRAJECTORIES, TRAJECTORY):
        computed = len(row["prompt_tokens"]) + len(row["response_tokens"]) - 1
        assert len(row["routed_experts"]) == computed * LAYERS * K
        assert max(row["routed_experts"]) < EXPERTS


@pytest.mark.extended
def test_with_truncated_sampling_every_step_of_sync_mode_is_on_policy(millrace: Millrace) -> None:
    settings = {"pipeline.mode": "sync", "training.max_steps": 3, "generation.top_p": 0.9}
    millrace.finish("nucleus", **settings)
    store = millrace.store("nucleus")
    kept = [count for row in read_rows(store, TRAJECTORIES, TRAJECTORY) for count in row["kept_counts"]]
    assert 1 < np.mean(kept) < 16, "some tokens of the vocabulary were left out, and not all but one"
    metrics = trainer_metrics(store)
    assert metrics["importance_ratio_mean"] == pytest.approx([1.0] * 3, abs=1e-5)
    assert metrics["importance_ratio_max"] == pytest.approx([1.0] * 3, abs=1e-4)
    assert metrics["mismatch_kl"] == pytest.approx([0.0] * 3, abs=1e-5)


@pytest.mark.extended
def test_weights_can_travel_through_the_store(millrace: Millrace) -> None:
    summary = millrace.finish("far", **{"weights.transport": "store"})
    assert summary["policy_versions_used"] > 1
    assert summary["weight_sync"]["transport"] == "store"


@pytest.mark.extended
def test_a_campaign_starts_from_a_named_model_and_prompts_in_a_file(millrace: Millrace, tmp_path: Path) -> None:
    prompts = tmp_path / "sums.jsonl"
    sums = [f'{{"q": "{a:02d}+{b:02d}=", "a": "{a + b:02d}"}}\n' for a in range(9) for b in range(9)]
    prompts.write_text("".join(sums))
    settings = {
        "model.path": str(start_model()),
        "prompts.source": str(prompts),
        "prompts.prompt_field": "q",
        "prompts.answer_field": "a",
        "prompts.num_eval": 32,
    }
    millrace.finish("own", **settings)
    assert not (millrace.root / "own" / "start").exists()
    prompt_ids = {row["prompt_id"] for row in read_rows(millrace.store("own"), TRAJECTORIES, TRAJECTORY)}
    assert prompt_ids <= {f"sums.jsonl:{line}" for line in range(1, 82)}


@pytest.mark.extended
def test_rewards_alone_make_the_policy_better_on_prompts_it_never_saw(millrace: Millrace) -> None:
    settings = {
        **FROM_SCRATCH,
        "model.warm_start_steps": 2000,
        "training.max_steps": 60,
        "training.groups_per_step": 64,
        "training.checkpoint_every": 20,
        "generation.groups_per_batch": 32,
        "prompts.num_eval": 512,
    }
    accuracy = {name: result["accuracy"] for name, result in millrace.finish("learner", **settings)["eval"].items()}
    assert accuracy["start"] <= 0.45
    assert accuracy["end"] >= accuracy["start"] + 0.15
