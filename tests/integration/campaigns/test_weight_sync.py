"""Whole campaigns in which weights travel by each transport, while processes are killed or frozen."""

from collections.abc import Callable
from pathlib import Path

import psutil
import pytest
from support.campaigns.campaigns import Millrace, assert_balanced
from support.campaigns.prefect_server import log_messages
from support.campaigns.weight_campaigns import (
    GENERATORS,
    GROUP_SIZE,
    GROUPS_PER_STEP,
    Tensors,
    WeightCampaign,
    make_weak_start_model,
)
from support.streams.rows import read_rows
from support.weights.direct_policies import layout_of, shards

from millrace.maintenance.fsck import fsck
from millrace.models.loading import empty_model
from millrace.weights.direct.relay import whole_fingerprint
from millrace.weights.fingerprint import Fingerprint, fingerprint
from storage import layout
from storage.schema import METRIC

pytestmark = pytest.mark.campaign

ROLLOUTS_PER_STEP = GROUPS_PER_STEP * GROUP_SIZE
TRANSPORTS = ["shm", "direct", "store"]
BFLOAT16 = {"generation.dtype": "bfloat16", "training.learning_rate": 1e-5}
"""Small steps in coarse numbers: a stored version is what changed since the one before."""
SETTINGS: dict[str, dict[str, object]] = {"shm": {}, "direct": {}, "store": BFLOAT16}


@pytest.fixture(scope="module")
def start_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model") / "start"
    make_weak_start_model(folder)
    return folder


def check_the_run(
    campaign: WeightCampaign,
    millrace: Millrace,
    transport: str,
    hashed: Callable[[Tensors], Fingerprint] = fingerprint,
) -> None:
    """Checks that it ended as usual, and that every generator worked with exactly the weights that it reported."""
    assert campaign.failpoints.missed() == []
    summary = millrace.summary(campaign.run_id)
    assert_balanced(summary)
    assert summary["steps"] == campaign.steps
    assert summary["ledger"]["trained"]["rollouts"] == campaign.steps * ROLLOUTS_PER_STEP
    assert set(summary["ledger"]["dropped"]) <= {"rolled_back", "stale"}
    assert summary["weight_sync"]["transport"] == transport
    report = fsck(campaign.store)
    assert report.damaged == 0, report.findings

    digests = campaign.digests("bfloat16" if transport == "store" else "float32", hashed)
    assert len(set(digests.values())) > campaign.steps / 2, "a step without any gradient is rare"
    last = max(digests)
    for generator in GENERATORS:
        status = campaign.status("generate", generator)
        assert (status["incarnation"], status["policy_version"]) == last
        assert status["weights_digest"] == digests[last]
        assert status["probe_alarms"] == 0
    assert {report.generator for report in campaign.acknowledged} == set(GENERATORS)
    for acknowledged in campaign.acknowledged:
        assert acknowledged.digest == digests[acknowledged.version], acknowledged
    assert last in campaign.measured_versions("sync_weights", 0, "push_seconds"), "acknowledged by everybody"
    assert campaign.all_token_versions() <= digests.keys()


@pytest.mark.extended
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_frozen_generator_delays_nobody_and_gets_the_newest_version_when_back(
    transport: str, millrace: Millrace, start_model: Path, prefect_api: str, tmp_path: Path
) -> None:
    # At `pause` the trainer waits for the frozen one, however long that takes, so that more versions follow.
    pause, steps = 28, 36
    waits = f"train-0 train.after_handover {pause} hang"
    with WeightCampaign(
        millrace,
        f"frozen-{transport}",
        transport,
        start_model,
        tmp_path / "fired",
        waits,
        steps=steps,
        **{"weights.deadline_seconds": 2.0, **SETTINGS[transport]},
    ) as campaign:
        # Frozen before it has made its share, it would starve the trainer: the other one makes every second group only.
        campaign.wait_until(
            lambda: campaign.trainer_version >= 4 and campaign.lead() <= ROLLOUTS_PER_STEP, "both to be at work"
        )
        frozen = campaign.process("generate", 1)
        frozen.suspend()
        before = campaign.trainer_version
        campaign.wait_until(lambda: 1 in campaign.status("sync_weights")["late"], "the frozen generator to be late")
        campaign.wait_until(lambda: campaign.trainer_version >= before + 4, "versions that the frozen one misses")
        campaign.wait_until(
            lambda: campaign.version_of_generator(0) >= campaign.version_of_generator(1) + 3,
            "the other one to have got them",
        )
        assert frozen.status() == psutil.STATUS_STOPPED
        frozen.resume()
        campaign.wait_until(lambda: campaign.failpoints.has_fired(waits), f"version {pause} to be handed over")
        campaign.wait_until(
            lambda: (
                campaign.version_of_generator(1) == campaign.version_of_generator(0)
                and 1 not in campaign.status("sync_weights")["late"]
            ),
            "the thawed generator to be back",
        )
        campaign.failpoints.release(waits)
        ended = campaign.finish()
    assert ended.code == 0, ended.output
    check_the_run(campaign, millrace, transport)
    assert any(
        one.generator == 1 and one.version[1] > pause and one.route == transport for one in campaign.acknowledged
    ), "served by the transport again"

    pushed = campaign.measured_versions("sync_weights", 0, "push_bytes")
    assert campaign.all_token_versions() <= pushed
    assert pushed <= campaign.measured_versions("train", 0, "loss") | {(0, 0)}
    lines = log_messages(prefect_api, campaign.run_id)
    assert not any("ALARM" in line for line in lines)
    others = "the others continue without it" if transport == "store" else "it is served by the store"
    assert any(line.startswith("generator 1 has no version ") and others in line for line in lines), lines
    assert any(line.startswith("generator 1 is back at version ") for line in lines), lines
    if transport == "store":
        assert campaign.stored_kinds() == {"anchor", "delta"}


@pytest.mark.parametrize(
    ("transport", "ranks"),
    [
        ("shm", 1),
        pytest.param("shm", 2, marks=pytest.mark.extended),
        pytest.param("store", 1, marks=pytest.mark.extended),
    ],
)
def test_generators_of_a_lora_campaign_get_adapters_also_after_a_kill(
    transport: str, ranks: int, millrace: Millrace, start_model: Path, prefect_api: str, tmp_path: Path
) -> None:
    num_layers, num_targets = empty_model(start_model).config.num_hidden_layers, 4
    num_tensors = 2 * num_targets * num_layers
    kill = f"generate-0 weights.mid_hash {3 * num_tensors + num_tensors // 2} kill"
    lora: dict[str, object] = {
        "training.lora.rank": 2,
        "training.learning_rate": 3e-3,
        "training.parallel.data": ranks,
    }
    with WeightCampaign(
        millrace, f"lora-{transport}-{ranks}", transport, start_model, tmp_path / "fired", kill, steps=8, **lora
    ) as campaign:
        ended = campaign.finish()
    assert ended.code == 0, ended.output
    check_the_run(campaign, millrace, transport)
    assert not any("ALARM" in line for line in log_messages(prefect_api, campaign.run_id))
    hidden = empty_model(start_model).config.hidden_size
    rows = read_rows(campaign.store, layout.metrics("sync_weights", 0), METRIC)
    # A and B of square layers in float32, for each generator.
    assert {row["value"] for row in rows if row["name"] == "push_bytes"} == {
        num_tensors * 2 * hidden * 4 * len(GENERATORS)
    }
    if transport == "store":
        assert campaign.stored_kinds() == {"adapter"}


def hashed_by_two_ranks(tensors: Tensors) -> Fingerprint:
    """The fingerprint of a live push from two ranks: sums of each rank's part."""
    divided = layout_of(tensors, 2)
    parts = [fingerprint(shards(tensors, divided, rank), method="sums").tensors for rank in (0, 1)]
    return whole_fingerprint(divided, parts, "sums")


@pytest.mark.vllm
@pytest.mark.extended
@pytest.mark.parametrize("killed", ["generate-0 live.call 14 kill", "sync_weights-0 direct.gone 4 kill"])
def test_two_ranks_push_into_the_vllms_of_a_campaign_also_after_a_kill(
    killed: str, millrace: Millrace, prefect_api: str, tmp_path: Path
) -> None:
    # Two heads of 32 features, which vLLM on a CPU can compute.
    make_weak_start_model(tmp_path / "start", hidden_size=64)
    settings: dict[str, object] = {
        "generation.engine": "vllm",
        "generation.engine_args": {"max_model_len": 64, "enforce_eager": True, "kv_cache_memory_bytes": 2**26},
        "training.parallel.data": 2,
        "weights.deadline_seconds": 60.0,
    }
    name = f"live-{killed.partition(' ')[0]}"
    with WeightCampaign(
        millrace, name, "gloo", tmp_path / "start", tmp_path / "fired", killed, steps=8, **settings
    ) as campaign:
        ended = campaign.finish()
    assert ended.code == 0, ended.output
    check_the_run(campaign, millrace, "gloo", hashed_by_two_ranks)
    assert not any("ALARM" in line for line in log_messages(prefect_api, campaign.run_id))


def kills(transport: str, num_tensors: int) -> list[str]:
    """Kills sync_weights and a generator, each in the middle of a push."""
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
def test_stages_killed_in_a_push_come_back_and_everybody_gets_the_last_version(
    transport: str, millrace: Millrace, start_model: Path, prefect_api: str, tmp_path: Path
) -> None:
    num_tensors = len(list(empty_model(start_model).named_parameters()))
    trainer = f"train-0 weights.mid_copy:handover {11 * num_tensors + num_tensors // 2} hang"
    if transport == "direct":
        trainer = "train-0 direct.before_snapshot 12 hang"
    armed, settings = [tmp_path / "fired", trainer, *kills(transport, num_tensors)], SETTINGS[transport]
    with WeightCampaign(
        millrace, f"killed-{transport}", transport, start_model, *armed, steps=24, **settings
    ) as campaign:
        campaign.wait_until(lambda: campaign.failpoints.has_fired(trainer), "the trainer to be handing version 11 over")
        # The checkpoint of version 10 is written meanwhile. Without it, the next trainer would go back to version 9,
        # and generators would hold a version 10 that is in no checkpoint.
        campaign.wait_until(
            lambda: campaign.checkpointed() >= max(10, campaign.trainer_version), "version 10 to be checkpointed"
        )
        campaign.process("train").kill()
        ended = campaign.finish()
    assert ended.code == 0, ended.output
    check_the_run(campaign, millrace, transport)
    assert {one.version[0] for one in campaign.acknowledged} == {0, 1}
    assert not any("ALARM" in line for line in log_messages(prefect_api, campaign.run_id))

    by_epoch = {generator: campaign.token_versions(generator) for generator in GENERATORS}
    assert max(by_epoch[0]) > max(by_epoch[1]), "generator 0 was killed, generator 1 was not"
    for generator, versions in by_epoch.items():
        # The killed process took its latest measurements with it.
        probed = campaign.measured_versions("generate", generator, "probe_difference")
        assert versions[max(versions)] <= probed
