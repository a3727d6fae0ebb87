"""Whole campaigns in which weights travel by each transport, while processes are killed or frozen."""

from pathlib import Path

import psutil
import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.campaigns.delivered import digests, measured, milestones, stored_kinds, tagged
from support.campaigns.weight_campaigns import GENERATORS, GROUP_SIZE, GROUPS_PER_STEP, WeightCampaign, make_start_model

from millrace.maintenance.fsck import fsck
from millrace.models.loading import empty_model
from storage.stores.factory import open_store

pytestmark = pytest.mark.campaign

STEP = GROUPS_PER_STEP * GROUP_SIZE
"""Rollouts that the trainer takes for one version."""
TRANSPORTS = ["shm", "direct", "store"]
BFLOAT16 = {"generation.dtype": "bfloat16", "training.learning_rate": 1e-5}
"""Small steps in coarse numbers: what is stored of a version is what changed since the one before."""
SETTINGS: dict[str, dict[str, object]] = {"shm": {}, "direct": {}, "store": BFLOAT16}


@pytest.fixture(scope="module")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "start"
    make_start_model(folder)
    return folder


def check_the_run(campaign: WeightCampaign, millrace: Millrace, transport: str) -> None:
    """It ended as usual, and every generator worked with exactly the weights that it said."""
    assert campaign.failpoints.missed() == []
    summary = millrace.summary(campaign.run_id)
    assert_balanced(summary)
    assert summary["steps"] == campaign.steps
    assert summary["ledger"]["trained"]["rollouts"] == campaign.steps * GROUPS_PER_STEP * GROUP_SIZE
    assert set(summary["ledger"]["dropped"]) <= {"rolled_back", "stale"}
    assert summary["weight_sync"]["transport"] == transport
    report = fsck(open_store(str(campaign.run)))
    assert report.damaged == 0, report.findings

    known = digests(campaign.run, campaign.start_model, "bfloat16" if transport == "store" else "float32")
    assert len(set(known.values())) > campaign.steps / 2, "a step without any gradient is rare"
    last = max(known)
    for generator in GENERATORS:
        status = campaign.status("generate", generator)
        assert (status["incarnation"], status["policy_version"]) == last
        assert status["weights_digest"] == known[last]
        assert status["probe_alarms"] == 0
    assert {seen.generator for seen in campaign.acknowledged} == set(GENERATORS)
    for seen in campaign.acknowledged:
        assert seen.digest == known[seen.version], seen
    assert last in measured(campaign.run, "sync_weights", 0, "push_seconds"), "acknowledged by everybody"
    assert {entry.version for entry in tagged(campaign.run)} <= known.keys()


@pytest.mark.extended
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_frozen_generator_holds_nobody_up_and_gets_the_newest_version_once_it_is_back(
    transport: str, millrace: Millrace, start_model: Path, prefect_api: str, tmp_path: Path
) -> None:
    settings = {"weights.deadline_seconds": 2.0, **SETTINGS[transport]}
    fired = tmp_path / "fired"
    # There the trainer waits for it to be back, so that there are versions to come, however long that takes.
    pause, steps = 28, 36
    with WeightCampaign(
        millrace,
        f"frozen-{transport}",
        transport,
        start_model,
        fired,
        f"train-0 train.after_handover {pause} stop",
        steps=steps,
        last_hand_over=steps,
        **settings,
    ) as campaign:
        # Frozen before it has made its share, it would starve the trainer: the other one makes every second group only.
        campaign.wait_until(lambda: campaign.trainer_version >= 4 and campaign.ahead() <= STEP, "both to be at work")
        frozen = campaign.process("generate", 1)
        frozen.suspend()
        before = campaign.trainer_version
        campaign.wait_until(lambda: 1 in campaign.status("sync_weights")["late"], "the frozen generator to be late")
        campaign.wait_until(lambda: campaign.trainer_version >= before + 4, "versions that the frozen one misses")
        campaign.wait_until(lambda: campaign.holds(0) >= campaign.holds(1) + 3, "the other one to have got them")
        assert frozen.status() == psutil.STATUS_STOPPED
        frozen.resume()
        campaign.wait_until(campaign.trainer_stopped, f"the trainer to stop behind version {pause}")
        campaign.wait_until(
            lambda: campaign.holds(1) == pause and 1 not in campaign.status("sync_weights")["late"],
            "the thawed generator to be back",
        )
        campaign.process("train").resume()
        ended = campaign.finish()
    assert ended.code == 0, ended.output
    check_the_run(campaign, millrace, transport)
    assert any(
        seen.generator == 1 and seen.version[1] > pause and seen.route == transport for seen in campaign.acknowledged
    ), "served by the transport again"

    pushed = measured(campaign.run, "sync_weights", 0, "push_bytes")
    assert {entry.version for entry in tagged(campaign.run)} <= pushed
    assert pushed <= measured(campaign.run, "train", 0, "loss") | {(0, 0)}
    said = milestones(prefect_api, campaign.run_id)
    assert not any("ALARM" in line for line in said)
    others = "the others continue without it" if transport == "store" else "it is served by the store"
    assert any(line.startswith("generator 1 has no version ") and others in line for line in said), said
    assert any(line.startswith("generator 1 is back at version ") for line in said), said
    if transport == "store":
        assert set(stored_kinds(campaign.run)) == {"anchor", "delta"}


def kills(transport: str, num_tensors: int) -> list[str]:
    """sync_weights and a generator, each in the middle of a push."""
    generator = f"generate-0 weights.mid_hash {3 * num_tensors + num_tensors // 2} kill"
    if transport == "direct":
        return ["generate-0 direct.before_arrival 4 kill", "sync_weights-0 direct.gone 7 kill"]
    if transport == "store":
        return [generator, "sync_weights-0 put.mid:weights/data/* 7 kill"]
    return [generator, f"sync_weights-0 weights.mid_hash {6 * num_tensors + num_tensors // 2} kill"]


@pytest.mark.parametrize(
    "transport",
    [pytest.param(t, marks=pytest.mark.extended if t == "direct" else pytest.mark.faults) for t in TRANSPORTS],
)
def test_killed_in_the_middle_of_a_push_each_stage_comes_back_and_everybody_gets_the_last_version(
    transport: str, millrace: Millrace, start_model: Path, prefect_api: str, tmp_path: Path
) -> None:
    num_tensors = len(list(empty_model(start_model).named_parameters()))
    trainer = f"train-0 weights.mid_copy:handover {11 * num_tensors + num_tensors // 2} hang"
    if transport == "direct":
        trainer = "train-0 direct.before_snapshot 12 hang"
    armed, settings = [tmp_path / "fired", trainer, *kills(transport, num_tensors)], SETTINGS[transport]
    with WeightCampaign(
        millrace, f"killed-{transport}", transport, start_model, *armed, steps=24, last_hand_over=14, **settings
    ) as campaign:
        campaign.wait_until(lambda: campaign.failpoints.has_fired(trainer), "the trainer to be handing version 11 over")
        # Its checkpoint is written meanwhile. Without it, the next trainer would go back to version 9, and the weights
        # of version 10, which generators have, would be nowhere to compare with.
        campaign.wait_until(lambda: campaign.checkpointed() == 10, "version 10 to be checkpointed")
        campaign.process("train").kill()
        ended = campaign.finish()
    assert ended.code == 0, ended.output
    check_the_run(campaign, millrace, transport)
    assert {incarnation for incarnation, _ in (seen.version for seen in campaign.acknowledged)} == {0, 1}
    assert not any("ALARM" in line for line in milestones(prefect_api, campaign.run_id))

    entries = tagged(campaign.run)
    last_epoch = {g: max(entry.epoch for entry in entries if entry.generator == g) for g in GENERATORS}
    assert last_epoch[0] > last_epoch[1], "generator 0 was killed, generator 1 was not"
    for generator in GENERATORS:
        # The killed process took its latest measurements with it.
        taken = measured(campaign.run, "generate", generator, "probe_difference")
        mine = {e.version for e in entries if e.generator == generator and e.epoch == last_epoch[generator]}
        assert mine <= taken
