"""Whole campaigns: four stages in processes of their own, joined by streams."""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced, stages_of, start_model
from support.training.router_mismatch import EXPERTS, LAYERS, K, mixture

from millrace.bootstrap.tiny_model import character_tokenizer
from storage import layout
from storage.checkpoints import load_file, read_latest
from storage.schema import METRIC, SCORE, TRAJECTORY
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign


def rows(run: Path, path: str, schema: pa.Schema) -> pa.Table:
    reader = StreamReader(open_store(str(run)), path, schema)
    parts = []
    while (part := reader.next()) is not None:
        parts.append(part.table)
    return pa.concat_tables(parts)


def final_weights(run: Path) -> bytes:
    store = open_store(str(run))
    checkpoint = read_latest(store)
    assert checkpoint is not None
    return load_file(store, checkpoint.files["model.safetensors"])


@pytest.mark.smoke
def test_a_campaign_without_a_prefect_server_runs_to_its_end_and_accounts_for_every_rollout(
    millrace_alone: Millrace,
) -> None:
    ended = millrace_alone.run(*millrace_alone.campaign("first", **FROM_SCRATCH))
    assert ended.code == 0, ended.output
    assert "accuracy, version 6" in ended.output
    summary = millrace_alone.summary("first")
    assert summary["state"] == "finished"
    assert summary["steps"] == 6
    assert set(summary["stage_pids"]) == {"generate-0", "score-0", "train-0", "sync_weights-0"}
    assert len(set(summary["stage_pids"].values())) == 4
    assert stages_of(millrace_alone.root / "first") == []
    assert_balanced(summary)
    assert summary["ledger"]["trained"]["rollouts"] == 6 * 16 * 8
    assert len(summary["staleness"]["histogram"]) > 1
    assert 0 < summary["staleness"]["max"] <= summary["staleness"]["bound"] == 2
    assert summary["weight_sync"]["count"] > 1
    assert summary["weight_sync"]["bytes"] > 0
    assert set(summary["eval"]) == {"start", "end"}
    assert millrace_alone.status("first") == summary


@pytest.mark.extended
def test_two_generators_and_two_scorers_share_the_work_and_no_group_is_made_twice(millrace: Millrace) -> None:
    settings = {"generation.replicas": 2, "scoring.replicas": 2, "weights.transport": "direct"}
    ended = millrace.run(*millrace.campaign("wide", **settings))
    assert ended.code == 0, ended.output
    summary = millrace.summary("wide")
    assert_balanced(summary)
    assert summary["policy_versions_used"] > 1
    assert summary["weight_sync"]["transport"] == "direct"
    run = millrace.root / "wide"
    tables = [rows(run, layout.trajectories(generator), TRAJECTORY) for generator in (0, 1)]
    groups = [set(table["group_id"].to_pylist()) for table in tables]
    assert {group % 2 for group in groups[0]} == {0}
    assert {group % 2 for group in groups[1]} == {1}
    for generator in (0, 1):
        for scorer in (0, 1):
            assert rows(run, layout.scores("exact_match", generator, scorer, 2), SCORE).num_rows > 0


@pytest.mark.extended
def test_sync_mode_is_on_policy_and_ends_in_the_same_weights_each_time(millrace: Millrace) -> None:
    for run_id in ("one", "two"):
        ended = millrace.run(*millrace.campaign(run_id, **{"pipeline.mode": "sync", "training.max_steps": 3}))
        assert ended.code == 0, ended.output
        assert set(millrace.summary(run_id)["staleness"]["histogram"]) == {"0"}
    assert final_weights(millrace.root / "one") == final_weights(millrace.root / "two")


def measured(run: Path) -> dict[str, list[float]]:
    """What the trainer measured, by name."""
    found: dict[str, list[float]] = {}
    for row in rows(run, layout.metrics("train", 0), METRIC).to_pylist():
        found.setdefault(row["name"], []).append(row["value"])
    return found


@pytest.mark.extended
def test_a_mixture_generates_in_half_precision_and_is_trained_through_the_same_experts(
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
    for replays in (False, True):
        ended = millrace.run(
            *millrace.campaign(f"replay-{replays}".lower(), **settings, **{"training.router_replay": replays})
        )
        assert ended.code == 0, ended.output
    off, on = (millrace.root / name for name in ("replay-false", "replay-true"))
    largest = [max(measured(run)["importance_ratio_max"]) - 1 for run in (off, on)]
    assert largest[1] < largest[0] / 2
    assert not len(rows(off, layout.trajectories(0), TRAJECTORY)["routed_experts"].combine_chunks().values)
    for row in rows(on, layout.trajectories(0), TRAJECTORY).to_pylist():
        computed = len(row["prompt_tokens"]) + len(row["response_tokens"]) - 1
        assert len(row["routed_experts"]) == computed * LAYERS * K
        assert max(row["routed_experts"]) < EXPERTS


@pytest.mark.extended
def test_with_truncated_sampling_every_step_of_sync_mode_is_on_policy(millrace: Millrace) -> None:
    settings = {"pipeline.mode": "sync", "training.max_steps": 3, "generation.top_p": 0.9}
    ended = millrace.run(*millrace.campaign("nucleus", **settings))
    assert ended.code == 0, ended.output
    kept = rows(millrace.root / "nucleus", layout.trajectories(0), TRAJECTORY)["kept_counts"].combine_chunks()
    assert len(kept.values) > 0
    assert 1 < np.mean(kept.values) < 16, "some tokens of the vocabulary were left out, and not all but one"
    found = measured(millrace.root / "nucleus")
    assert len(found["importance_ratio_mean"]) == 3
    assert found["importance_ratio_mean"] == pytest.approx([1.0] * 3, abs=1e-5)
    assert found["importance_ratio_max"] == pytest.approx([1.0] * 3, abs=1e-4)
    assert found["mismatch_kl"] == pytest.approx([0.0] * 3, abs=1e-5)


@pytest.mark.extended
def test_weights_can_travel_through_the_store(millrace: Millrace) -> None:
    ended = millrace.run(*millrace.campaign("far", **{"weights.transport": "store"}))
    assert ended.code == 0, ended.output
    summary = millrace.summary("far")
    assert summary["policy_versions_used"] > 1
    assert summary["weight_sync"]["transport"] == "store"
    assert_balanced(summary)


@pytest.mark.extended
def test_a_campaign_starts_from_a_named_model_and_learns_from_prompts_in_a_file(
    millrace: Millrace, tmp_path: Path
) -> None:
    prompts = tmp_path / "sums.jsonl"
    prompts.write_text(
        "".join(f'{{"q": "{a:02d}+{b:02d}=", "a": "{a + b:02d}"}}\n' for a in range(9) for b in range(9))
    )
    settings = {
        "model.path": str(start_model()),
        "prompts.source": str(prompts),
        "prompts.prompt_field": "q",
        "prompts.answer_field": "a",
        "prompts.num_eval": 32,
    }
    ended = millrace.run(*millrace.campaign("own", **settings))
    assert ended.code == 0, ended.output
    assert not (millrace.root / "own" / "start").exists()
    table = rows(millrace.root / "own", layout.trajectories(0), TRAJECTORY)
    assert set(table["prompt_id"].to_pylist()) <= {f"sums.jsonl:{line}" for line in range(1, 82)}


@pytest.mark.extended
def test_rewards_alone_make_the_policy_better_on_prompts_it_never_saw(millrace: Millrace) -> None:
    settings = {
        **FROM_SCRATCH,
        "model.warm_start_steps": 2000,
        # Two threads crawl where other tests are at work.
        "training.max_steps": 60,
        "training.groups_per_step": 64,
        "training.checkpoint_every": 20,
        "generation.groups_per_batch": 32,
        "prompts.num_eval": 512,
    }
    ended = millrace.run(*millrace.campaign("learner", **settings))
    assert ended.code == 0, ended.output
    accuracy = {name: result["accuracy"] for name, result in millrace.summary("learner")["eval"].items()}
    assert accuracy["start"] <= 0.45
    assert accuracy["end"] >= accuracy["start"] + 0.15
