"""Trainer and generators on one device: the lock between them, and one side is awake while the run makes progress."""

import gc
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.stages.colocated import ALL, Colocated, colocated_config
from support.stages.workshop import Workshop, weights
from support.stores.memory import unused_name
from transformers import PreTrainedTokenizerFast

from millrace.runtime.device_sharing import Device
from storage.progress import read_status, write_progress
from storage.stores.memory import MemoryStore

HOLD = """
import sys
from pathlib import Path
from millrace.runtime.device_sharing import Device
device = Device(Path(sys.argv[1]) / "device", alone=sys.argv[2] == "alone")
print(device.take(), flush=True)
sys.stdin.read()
"""


def test_a_trainer_gets_the_device_when_all_generators_gave_it_back(tmp_path: Path) -> None:
    first, second = (Device(tmp_path / "device", alone=False) for _ in range(2))
    trainer = Device(tmp_path / "device", alone=True)
    assert first.take()
    assert second.take()
    assert not trainer.take()
    first.give_back()
    assert not trainer.take()
    second.give_back()
    assert trainer.take()
    assert not first.take()
    assert (trainer.held, first.held, second.held) == (True, False, False)
    trainer.give_back()
    assert first.take()


def test_on_a_device_of_its_own_every_stage_always_holds_it(tmp_path: Path) -> None:
    devices = [Device(alone=alone) for alone in (True, True, False)]
    assert all(device.take() and device.held and not device.shared for device in devices)
    devices[0].give_back()
    assert devices[0].held
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_is_killed_has_given_it_back(tmp_path: Path) -> None:
    device = Device(tmp_path / "device", alone=False)
    holder = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(tmp_path), "alone"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert holder.stdout is not None
    assert holder.stdout.readline() == "True\n"
    assert not device.take()
    holder.kill()
    holder.communicate()
    assert device.take()


@pytest.fixture
def trainer(tmp_path: Path) -> Device:
    """The device as the trainer sees it."""
    return Device(tmp_path / "device", alone=True)


@pytest.fixture
def workshop(memory_store: MemoryStore, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> Workshop:
    """One generator, awake, that makes four groups a step."""
    return Workshop(memory_store, tokenizer, colocated_config(1), shared=tmp_path / "device")


def asleep_since_version(workshop: Workshop) -> int | None:
    since: int | None = read_status(workshop.store, "generate", 0)["asleep_since_version"]
    return since


def test_a_generator_without_weights_sleeps_so_that_the_trainer_can_make_the_first(
    workshop: Workshop, trainer: Device
) -> None:
    assert not trainer.take()
    assert asleep_since_version(workshop) is None
    workshop.turn(ALL)
    assert not workshop.engine.awake
    assert asleep_since_version(workshop) == 0
    assert trainer.take()


def test_a_generator_sleeps_once_all_groups_of_its_version_are_committed(workshop: Workshop, trainer: Device) -> None:
    workshop.turn([0, 1], new=weights(0))
    workshop.turn([])
    assert workshop.engine.awake
    assert not trainer.take()
    workshop.turn(ALL)
    assert workshop.committed() == [([0, 1, 2, 3], 0)]
    workshop.turn(ALL)
    assert not workshop.engine.awake
    assert asleep_since_version(workshop) == 0
    assert trainer.take()


def test_new_weights_wait_for_the_device_and_are_not_lost(workshop: Workshop, trainer: Device) -> None:
    workshop.turn(ALL, new=weights(0))
    workshop.turn(ALL)
    assert trainer.take()
    workshop.turn(ALL, new=weights(1))
    assert (workshop.engine.awake, workshop.engine.policy_version) == (False, 0)
    trainer.give_back()
    workshop.turn(ALL)
    assert (workshop.engine.awake, workshop.engine.policy_version) == (True, 1)
    assert asleep_since_version(workshop) is None
    assert workshop.committed() == [([0, 1, 2, 3], 0), ([4, 5, 6, 7], 1)]


def test_a_dropped_group_wakes_a_generator_though_no_new_version_came(workshop: Workshop, trainer: Device) -> None:
    workshop.turn(ALL, new=weights(0))
    workshop.turn(ALL)
    assert not workshop.engine.awake
    write_progress(workshop.store, "train", 0, {"groups_dropped": 1})
    workshop.turn(ALL)
    assert workshop.committed() == [([0, 1, 2, 3], 0), ([4], 0)]
    workshop.turn(ALL)
    assert not workshop.engine.awake
    assert trainer.take()


EVENTS = ("train", "generate 0", "generate 1", "begin 0", "begin 1", "kill 0", "kill 1", "kill trainer", "drop")
TURNS_OF_A_VERSION = 6


@pytest.fixture
def quick_collections() -> Iterator[None]:
    """Excludes existing objects from the collections that kills trigger; torch's would take a second."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.mark.slow
@pytest.mark.usefixtures("quick_collections")
@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(events=st.lists(st.sampled_from(EVENTS), min_size=20, max_size=40))
def test_whatever_is_killed_or_dropped_one_side_is_awake_and_the_run_gets_on(
    tokenizer: PreTrainedTokenizerFast, tmp_path_factory: pytest.TempPathFactory, events: list[str]
) -> None:
    store = MemoryStore(unused_name())
    try:
        run = Colocated(store, tokenizer, tmp_path_factory.mktemp("run"), replicas=2)
        for event in events:
            happen(run, event)
        version = run.policy_version
        # Two versions; each takes at most this many turns of every stage, and dropped groups take some more.
        for _ in range(2 * TURNS_OF_A_VERSION + len(events)):
            if run.policy_version == version + 2:
                break
            for event in EVENTS[:3]:
                happen(run, event)
        assert run.policy_version == version + 2
    finally:
        shutil.rmtree(store.root, ignore_errors=True)


def happen(run: Colocated, event: str) -> None:
    """`begin` is a turn of a generator that finishes nothing: it may be killed with rollouts in flight."""
    match event.split():
        case ["train"]:
            run.train()
        case ["kill", "trainer"]:
            run.kill_trainer()
        case ["drop"]:
            if run.trainer is not None:
                run.trainer.to_drop += 1
        case [what, replica]:
            number = int(replica) % run.replicas
            if what == "kill":
                run.kill_generator(number)
            else:
                run.generate(number, finish=what == "generate")
