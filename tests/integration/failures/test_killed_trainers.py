"""Trainers killed under an adaptive bound and between two updates on a batch: no token is trained too old or twice."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.campaigns.campaigns import Millrace, final_weights
from support.campaigns.prefect_server import find, flow_runs_of
from support.streams.rows import read_rows

from flows.display.artifacts import artifact_key
from millrace.rollouts.lineage import Lineage
from millrace.runs.decisions import StoredDecision, read_decisions
from storage import layout
from storage.checkpoints import read_latest
from storage.schema import CONSUMED, TRAJECTORY

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS = 40
LOWEST, HIGHEST = 1, 4
SETTINGS: dict[str, object] = {
    "training.max_steps": STEPS,
    "training.checkpoint_every": 4,
    "staleness.control": "adaptive",
    "staleness.max_staleness": HIGHEST,
    "staleness.too_old": "mask",
}
KILLS = (
    "train-0 train.before_handover 7 kill",
    "generate-0 generate.before_commit 9 kill",
    "train-0 put.mid:checkpoints/log/* 5 kill",
    "generate-0 put.after:streams/trajectories/0/log/* 15 kill",
    "controller controller.started 1 kill",
)


def bounds_by_decisions(decisions: list[StoredDecision], lineage: Lineage) -> list[int]:
    """The bound of each version, from the surviving decisions: up at once, down by one per version."""
    target, bounds = LOWEST, [LOWEST]
    decided = {
        decision.policy_version: decision
        for decision in decisions
        if lineage.holds(decision.incarnation, decision.policy_version)
    }
    for version in range(1, STEPS):
        if version - 1 in decided:
            target = decided[version - 1].max_staleness
        bounds.append(max(target, bounds[-1] - 1))
    return bounds


def decisions_in_prefect(prefect_api: str, run_id: str) -> list[dict[str, str]]:
    """The rows of the artifact with the latest decisions of the run's last attempt, oldest first."""
    flow_runs = [flow_run["id"] for flow_run in flow_runs_of(prefect_api, run_id)]
    mine = {"flow_run_id": {"any_": flow_runs}, "key": {"any_": [artifact_key(run_id, "decisions")]}}
    artifacts = find(prefect_api, "artifacts", artifacts=mine)
    assert len(artifacts) <= len(flow_runs)
    rows: list[dict[str, str]] = json.loads(max(artifacts, key=lambda artifact: str(artifact["created"]))["data"])
    return rows


def trained_versions(trajectory: dict[str, Any], masked: int) -> list[int]:
    """The versions that sampled the trained tokens: those with loss, without the oldest `masked` ones."""
    tokens = len(trajectory["response_tokens"])
    lengths = np.diff(trajectory["span_starts"], append=tokens)
    versions = np.repeat(trajectory["span_versions"], lengths)
    with_loss = np.sort(versions[np.array(trajectory["loss_mask"]) > 0])
    return [int(version) for version in with_loss[masked:]]


def test_through_kills_no_token_is_trained_beyond_the_bound_of_its_version(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    armed = millrace.arm(tmp_path / "fired", *KILLS)
    killed = millrace.run(*millrace.campaign("moving", **SETTINGS))
    assert killed.code == -signal.SIGKILL, killed.output
    for window in ({"budget.max_steps": STEPS // 2}, {}):
        summary = millrace.finish("moving", "--resume", **SETTINGS, **window)
    assert armed.missed() == []

    assert summary["steps"] == STEPS
    assert summary["decisions"]["count"] > 0
    shown = [row["reason"] for row in decisions_in_prefect(prefect_api, "moving")]
    assert [decision["reason"] for decision in summary["decisions"]["latest"]] == shown
    store = millrace.store("moving")
    checkpoint = read_latest(store)
    assert checkpoint is not None
    lineage = Lineage.of(store, checkpoint.incarnation)
    bounds = bounds_by_decisions(read_decisions(store), lineage)
    assert max(bounds) > LOWEST, "the bound has moved"
    trajectories = {row["row_id"]: row for row in read_rows(store, layout.trajectories(0), TRAJECTORY)}
    taken = [
        row
        for row in read_rows(store, layout.CONSUMED, CONSUMED)
        if row["outcome"] == "trained" and lineage.holds(row["incarnation"], row["policy_version"])
    ]
    assert len({row["trajectory_row_id"] for row in taken}) == len(taken)
    assert len(taken) == summary["ledger"]["trained"]["rollouts"]
    too_old = [
        (row["policy_version"], version)
        for row in taken
        for version in trained_versions(trajectories[row["trajectory_row_id"]], row["masked_tokens"])
        if row["policy_version"] - 1 > version + bounds[version]
    ]
    assert too_old == []
    assert max(row["staleness"] for row in taken) > LOWEST, "the bound that was raised has been used"

    millrace.run("fsck", str(millrace.root / "moving")).expect_success()
    millrace.run("replay", str(millrace.root / "moving"), "--root", str(millrace.root), "--verify").expect_success()


UPDATE_STEPS, ROLLOUTS_PER_STEP = 4, 16 * 8
UPDATE_SETTINGS: dict[str, object] = {
    "pipeline.mode": "sync",
    "training.max_steps": UPDATE_STEPS,
    "training.minibatches": 2,
    "training.epochs": 2,
    "training.loss": "decoupled_ppo",
    "training.entropy_coefficient": 0.001,
    "training.frozen_layers": 1,
    "training.schedule.decay": "cosine",
    "training.schedule.warmup_steps": 1,
    "training.schedule.steps": UPDATE_STEPS,
}
IN_SECOND_EPOCHS = ("train-0 train.mid_step 4 kill", "train-0 train.mid_step 11 kill")
"""A step passes the place four times: the fourth time is in the first step's second epoch, and the eleventh time after
that in the second epoch of the third step."""


def test_a_trainer_killed_in_a_second_epoch_ends_with_the_same_weights(millrace: Millrace, tmp_path: Path) -> None:
    millrace.finish("calm", **UPDATE_SETTINGS)
    armed = millrace.arm(tmp_path / "fired", *IN_SECOND_EPOCHS)
    summary = millrace.finish("wounded", **UPDATE_SETTINGS)
    assert armed.missed() == []
    assert summary["ledger"]["trained"]["rollouts"] == UPDATE_STEPS * ROLLOUTS_PER_STEP
    assert final_weights(millrace.store("wounded"), UPDATE_STEPS) == final_weights(millrace.store("calm"), UPDATE_STEPS)
    verified = millrace.run("replay", str(millrace.root / "wounded"), "--root", str(millrace.root), "--verify")
    assert "the same bit for bit" in verified.expect_success()
