"""New versions by each transport, and bytes of a day."""

from dataclasses import replace

import pyarrow as pa
import pytest

from millrace.planning.costs.assumptions import DEFAULTS
from millrace.planning.costs.hardware import hardware_named
from millrace.planning.costs.known_models import model_named
from millrace.planning.costs.storage import (
    checkpoint_bytes,
    checkpoint_seconds,
    rollout_bytes,
    stored_bytes,
)
from millrace.planning.costs.training import TrainerSetup
from millrace.planning.costs.weight_sync import SyncSetup, sync_seconds
from storage.schema import TRAJECTORY

H100 = hardware_named("h100")
LLAMA = model_named("llama-8b")
SMALL = replace(LLAMA, layers=4)
EIGHT = SyncSetup(data=8, tensor=1, generators=2, workers=2)
NBYTES = SMALL.parameters * 2


def test_a_trainer_stands_still_for_its_own_shards_alone_where_they_are_sent_as_they_are() -> None:
    direct = sync_seconds("direct", SMALL, EIGHT, H100, DEFAULTS)
    gathered = sync_seconds("shm", SMALL, EIGHT, H100, DEFAULTS)
    copied = NBYTES / (64e9 * DEFAULTS.host_copy_share)
    assert gathered.handover - direct.handover > 7 / 8 * copied
    assert direct.pause == gathered.pause == pytest.approx(copied / 2)


def test_a_push_carries_the_model_to_each_generator_which_hands_it_on() -> None:
    one = sync_seconds("direct", SMALL, replace(EIGHT, generators=1), H100, DEFAULTS)
    eight = sync_seconds("direct", SMALL, replace(EIGHT, generators=8), H100, DEFAULTS)
    assert NBYTES / DEFAULTS.socket_rate < one.push < eight.push < 1.2 * one.push


@pytest.mark.parametrize("transport", ["shm", "direct", "store"])
def test_faster_links_never_make_a_version_later(transport: str) -> None:
    found = sync_seconds(transport, SMALL, EIGHT, H100, DEFAULTS)
    better = replace(H100, nvlink=900e9, network=100e9, host_copy=128e9)
    faster = replace(DEFAULTS, socket_rate=2e9, store_write=1e9, store_read=1e9, hash_rate=40e9)
    for hardware, assumptions in ((better, DEFAULTS), (H100, faster), (better, faster)):
        other = sync_seconds(transport, SMALL, EIGHT, hardware, assumptions)
        assert other.handover <= found.handover
        assert other.push <= found.push
        assert other.pause <= found.pause


def test_through_a_store_a_version_is_written_and_read() -> None:
    shared = sync_seconds("shm", SMALL, EIGHT, H100, DEFAULTS)
    stored = sync_seconds("store", SMALL, EIGHT, H100, DEFAULTS)
    assert stored.push - shared.push == pytest.approx(NBYTES / 0.4e9 + NBYTES / 0.7e9)


def test_a_response_token_takes_13_bytes_and_a_prompt_token_4() -> None:
    # Its id, log μ, whether it has loss, log π of the trainer.
    assert rollout_bytes(0, 1000) - rollout_bytes(0, 0) == 13 * 1000
    assert rollout_bytes(1000, 0) - rollout_bytes(0, 0) == 4 * 1000
    assert rollout_bytes(0, 1000, kept_tokens=20) - rollout_bytes(0, 1000) == 4 * 21 * 1000


def test_a_trajectory_takes_about_what_arrow_takes() -> None:
    tokens = 2000
    row = {field.name: [_value(field.type, tokens if field.name in _OF_TOKENS else 2)] for field in TRAJECTORY}
    stored = pa.table(row, schema=TRAJECTORY).nbytes
    assert stored == pytest.approx(rollout_bytes(0, tokens) - 4 * tokens, rel=0.05)


_OF_TOKENS = ("response_tokens", "rollout_logprobs", "loss_mask")


def _value(kind: pa.DataType, length: int) -> object:
    if pa.types.is_list(kind):
        return [_value(kind.value_type, 0)] * length
    return "four" if pa.types.is_string(kind) else 1


def test_a_checkpoint_is_weights_and_two_moments() -> None:
    setup = TrainerSetup(data=8)
    assert checkpoint_bytes(LLAMA, setup) == 12 * LLAMA.parameters
    own = 12 * LLAMA.parameters / 8
    assert checkpoint_seconds(LLAMA, setup, H100, DEFAULTS) == pytest.approx(own / 32e9)


def test_a_day_stores_its_rollouts_and_checkpoints() -> None:
    day = stored_bytes(1000.0, rollouts_per_step=512, checkpoint=1e9, checkpoint_every=10, step_seconds=60.0)
    assert day.rollouts_per_day == 512 * 1440
    assert day.per_day == 1000 * 512 * 1440 + 144 * 1e9
