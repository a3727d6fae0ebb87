"""A campaign that moves its own staleness bound, killed at several places and resumed: no token was trained too old."""

import json
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.campaigns.prefect_server import find
from support.stages.failpoints import Failpoints

from flows.display.artifacts import artifact_key
from millrace.rollouts.lineage import Lineage
from millrace.runs.decisions import StoredDecision, read_decisions
from storage import layout
from storage.checkpoints import read_latest
from storage.failpoints import FIRED, SPECS
from storage.schema import CONSUMED, TRAJECTORY
from storage.stores.base import Store
from storage.stores.factory import open_store
from storage.streams.stream import StreamReader

pytestmark = [pytest.mark.campaign, pytest.mark.extended]

STEPS = 40
LOWEST, HIGHEST = 1, 4
SETTINGS: dict[str, object] = {
    "training.max_steps": STEPS,
    "training.checkpoint_every": 4,
    "staleness.control": "adaptive",
    "staleness.max_staleness": HIGHEST,
}
KILLS = (
    "train-0 train.before_handover 7 kill",
    "generate-0 generate.before_commit 9 kill",
    "train-0 put.mid:checkpoints/log/* 5 kill",
    "generate-0 put.after:streams/trajectories/0/log/* 15 kill",
    "controller controller.started 1 kill",
)


def bounds_by_decisions(decisions: list[StoredDecision], lineage: Lineage) -> list[int]:
    """The bound of each version as the decisions that survive explain it: up at once, down by one per version."""
    target, bounds = LOWEST, [LOWEST]
    decided = {one.policy_version: one for one in decisions if lineage.holds(one.incarnation, one.policy_version)}
    for version in range(1, STEPS):
        if version - 1 in decided:
            target = decided[version - 1].max_staleness
        bounds.append(max(target, bounds[-1] - 1))
    return bounds


def decisions_in_prefect(prefect_api: str, run_id: str) -> list[dict[str, Any]]:
    """The artifacts with the run's decisions, oldest first."""
    runs = find(prefect_api, "flow_runs", flow_runs={"name": {"any_": [run_id]}})
    mine = {"flow_run_id": {"any_": [run["id"] for run in runs]}, "key": {"any_": [artifact_key(run_id, "decisions")]}}
    return sorted(find(prefect_api, "artifacts", artifacts=mine), key=lambda one: str(one["created"]))


def rows_of(store: Store, stream: str, schema: Any) -> list[dict[str, Any]]:
    reader = StreamReader(store, stream, schema)
    return [row for part in iter(reader.next, None) for row in part.table.to_pylist()]


def trained_versions(trajectory: dict[str, Any], masked: int) -> list[int]:
    """The versions that sampled the tokens that were trained: those with loss, without the oldest `masked` ones."""
    tokens = len(trajectory["response_tokens"])
    lengths = np.diff(trajectory["span_starts"], append=tokens)
    versions = np.repeat(trajectory["span_versions"], lengths)
    with_loss = np.sort(versions[np.array(trajectory["loss_mask"]) > 0])
    return [int(version) for version in with_loss[masked:]]


def test_through_kills_and_resumes_no_token_is_trained_beyond_the_bound_of_its_version(
    millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    armed = Failpoints(tmp_path / "fired", *KILLS)
    environment = armed.environment()
    millrace.environment |= {name: environment[name] for name in (SPECS, FIRED)}
    killed = millrace.run(*millrace.campaign("moving", **SETTINGS))
    assert killed.code == -signal.SIGKILL, killed.output
    for window in ({"budget.max_steps": STEPS // 2}, {}):
        ended = millrace.run(*millrace.campaign("moving", "--resume", **SETTINGS, **window))
        assert ended.code == 0, ended.output
    assert armed.missed() == []

    summary = millrace.summary("moving")
    assert_balanced(summary)
    assert summary["steps"] == STEPS
    assert summary["decisions"]["count"] > 0
    shown = [json.loads(one["data"]) for one in decisions_in_prefect(prefect_api, "moving")]
    assert [one["reason"] for one in summary["decisions"]["latest"]] == [row["reason"] for row in shown[-1]]
    store = open_store(str(millrace.root / "moving"))
    checkpoint = read_latest(store)
    assert checkpoint is not None
    lineage = Lineage.of(store, checkpoint.incarnation)
    bounds = bounds_by_decisions(read_decisions(store), lineage)
    assert max(bounds) > LOWEST, "the bound has moved"
    trajectories = {row["row_id"]: row for row in rows_of(store, layout.trajectories(0), TRAJECTORY)}
    taken = [
        row
        for row in rows_of(store, layout.CONSUMED, CONSUMED)
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

    for command in (["fsck"], ["replay", "--root", str(millrace.root), "--verify"]):
        ended = millrace.run(command[0], str(millrace.root / "moving"), *command[1:])
        assert ended.code == 0, ended.output
