"""Whole campaigns whose processes are killed at named places: nothing committed is lost, nothing is trained twice."""

import itertools
import os
from pathlib import Path

import pytest
from support.campaigns.campaigns import FROM_SCRATCH, Millrace, assert_balanced, final_weights
from support.campaigns.kill_matrix import FAILPOINTS, WHILE_STORING_UNFINISHED, campaigns, is_asynchronous
from support.damage.recount import check_recount

from millrace.rollouts.group_sequence import committed_groups
from millrace.rollouts.lineage import Lineage
from storage import layout
from storage.checkpoints import read_latest
from storage.schema import TRAJECTORY
from storage.stores.base import Store
from storage.streams.stream import StreamReader

pytestmark = pytest.mark.campaign

SEED = int(os.environ.get("MILLRACE_FAULT_SEED", "0"))
REDUCED, WHOLE = 3, 26
"""`make test` goes through the first campaign, `make test-all` through the first three, `make faults` through the rest:
ten kills each.
"""
STEPS, GROUPS, GROUP_SIZE = 12, 16, 8
SETTINGS = {**FROM_SCRATCH, "training.max_steps": STEPS}
SYNC: dict[str, object] = {"pipeline.mode": "sync"}
ASYNC: dict[str, object] = {"storage.commit_unfinished_seconds": 0.2}
SIGKILLED = -9


def accepted_groups(store: Store) -> tuple[list[int], set[int]]:
    """The groups in the history of the last trainer, in stream order, each of them whole; groups in flight."""
    checkpoint = read_latest(store)
    assert checkpoint is not None
    lineage = Lineage.of(store, checkpoint.incarnation)
    reader, rows = StreamReader(store, layout.trajectories(0), TRAJECTORY), []
    while (part := reader.next()) is not None:
        if lineage.holds(part.record.incarnation, part.record.max_policy_version):
            rows += part.table["group_id"].to_pylist()
    groups = [group_id for group_id, _ in itertools.groupby(rows)]
    assert rows == [group_id for group_id in groups for _ in range(GROUP_SIZE)]
    return groups, committed_groups(store, 0, 1, lineage).missing


@pytest.fixture(scope="module")
def uninterrupted(module_millrace: Millrace) -> bytes:
    """The final weights of the undisturbed sync campaign."""
    module_millrace.finish("calm", **SETTINGS, **SYNC)
    return final_weights(module_millrace.store("calm"), STEPS)


def survive(millrace: Millrace, specs: list[str], settings: dict[str, object], tmp_path: Path) -> None:
    """Runs one campaign through all these kills, and checks its ledger and streams."""
    armed = millrace.arm(tmp_path / "fired", *specs)
    run = millrace.root / "wounded"
    arguments = millrace.campaign("wounded", "--resume", "latest", **SETTINGS, **settings)
    # The controller is killed too, and started again by hand.
    while (ended := millrace.run(*arguments)).code == SIGKILLED:
        pass
    assert ended.code == 0, f"{armed.armed}\n{ended.output}"
    assert armed.missed() == []
    summary = millrace.summary("wounded")
    assert_balanced(summary)
    print(f"recount: {check_recount(run, summary)}")
    assert summary["steps"] == STEPS
    assert summary["ledger"]["trained"]["rollouts"] == STEPS * GROUPS * GROUP_SIZE
    assert set(summary["ledger"]["dropped"]) <= {"rolled_back", "stale"}
    groups, missing = accepted_groups(millrace.store("wounded"))
    assert len(set(groups)) == len(groups)
    assert {*groups, *missing} == set(range(max(groups) + 1))
    assert settings is not SYNC or groups == list(range(len(groups)))
    millrace.run("fsck", str(run)).expect_success()


def check(number: int, millrace: Millrace, tmp_path: Path, uninterrupted: bytes) -> None:
    """Runs campaign `number` of the matrix. The weights of an asynchronous one depend on who was faster."""
    specs = next(itertools.islice(campaigns(SEED), number, None))
    print(f"seed {SEED}, campaign {number}: {'; '.join(specs)}")
    asynchronous = is_asynchronous(number)
    survive(millrace, specs, ASYNC if asynchronous else SYNC, tmp_path)
    if not asynchronous:
        assert final_weights(millrace.store("wounded"), STEPS) == uninterrupted


@pytest.mark.parametrize("number", [0, *(pytest.param(n, marks=pytest.mark.extended) for n in range(1, REDUCED))])
def test_killed_anywhere_a_campaign_loses_and_repeats_nothing(
    number: int, millrace: Millrace, tmp_path: Path, uninterrupted: bytes
) -> None:
    check(number, millrace, tmp_path, uninterrupted)


@pytest.mark.faults
@pytest.mark.parametrize("number", range(REDUCED, WHOLE))
def test_two_hundred_kills(number: int, millrace: Millrace, tmp_path: Path, uninterrupted: bytes) -> None:
    check(number, millrace, tmp_path, uninterrupted)


def test_the_matrix_kills_often_enough_and_everywhere() -> None:
    reduced = [spec for specs in itertools.islice(campaigns(SEED), REDUCED) for spec in specs]
    whole = [spec for specs in itertools.islice(campaigns(SEED), REDUCED, WHOLE) for spec in specs]
    assert len({tuple(spec.split()[:2]) for spec in reduced}) >= 24
    assert len(whole) >= 200
    storing = {("generate-0", place) for place in WHILE_STORING_UNFINISHED}
    assert {tuple(spec.split()[:2]) for spec in whole} == storing | {
        (p, place) for p, places in FAILPOINTS.items() for place in places
    }
    assert min(len(places) for places in FAILPOINTS.values()) >= 5
