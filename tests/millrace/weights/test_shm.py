"""Shared memory between the trainer, sync_weights and the generators, beyond the transports' contract."""

import random
import shutil
import threading
from pathlib import Path

import pytest
import torch
from support.weights.shm_host import Host, assert_is
from support.weights.versions import Tensors, mixed, mixed_tensors, sha256

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Manifest, Probe, Weights
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender
from millrace.weights.slots import SlotFile


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path)


def flip_a_bit(path: Path, tensor: torch.Tensor) -> None:
    """Where in the file the tensor's bytes are."""
    flip_a_bit_of(path, tensor.reshape(-1).view(torch.uint8).numpy().tobytes())


def flip_a_bit_of(path: Path, content: bytes) -> None:
    content_of_file = path.read_bytes()
    assert content_of_file.count(content) == 1
    with path.open("r+b") as file:
        file.seek(content_of_file.find(content))
        file.write(bytes([content[0] ^ 1]))


def test_sync_weights_takes_the_fingerprint_of_what_the_trainer_handed_over(host: Host) -> None:
    host.trainer.publish(mixed(3))
    taken = host.sync.poll(None)
    assert_is(taken, 3)
    assert taken is not None
    assert taken.manifest.fingerprint == fingerprint(mixed_tensors(3))
    assert taken.shared is not None
    assert sha256(taken.shared.map()) == sha256(mixed_tensors(3))


def test_generators_see_what_sync_weights_pushed_and_pushing_copies_nothing(host: Host) -> None:
    host.trainer.publish(mixed(3))
    taken = host.sync.poll(None)
    assert taken is not None
    assert host.generators[0].poll(None) is None
    host.sync.publish(taken)
    live = host.generators[0].poll(None)
    assert live is not None
    assert live.shared == taken.shared


def test_only_what_was_taken_last_can_be_pushed(host: Host) -> None:
    host.trainer.publish(mixed(3))
    older = host.sync.poll(None)
    assert older is not None
    host.trainer.publish(mixed(4))
    assert host.sync.poll(older.id) is not None
    with pytest.raises(ValueError):
        host.sync.publish(older)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_the_trainer_has_in_float32_arrives_in_the_type_of_the_file(tmp_path: Path, dtype: torch.dtype) -> None:
    master = {"embed": torch.randn(33, 7), "norm": torch.randn(5, requires_grad=True)}
    host = Host(tmp_path, like={name: tensor.detach().to(dtype) for name, tensor in master.items()})
    host.trainer.publish(mixed(1, tensors=master))
    host.push()
    taken = host.generators[1].poll(None)
    assert taken is not None
    for name, tensor in master.items():
        assert taken.tensors[name].dtype == dtype
        assert torch.equal(taken.tensors[name], tensor.detach().to(dtype)), name


@pytest.mark.parametrize("name", list(mixed_tensors(0))[1:])
def test_a_flipped_bit_in_a_pushed_slot_is_refused_by_name(host: Host, name: str) -> None:
    host.deliver(6)
    flip_a_bit(host.path, mixed_tensors(6)[name])
    with pytest.raises(WeightsCorrupt, match=f"{name}$"):
        host.generators[0].poll(None)
    host.deliver(7)
    assert_is(host.generators[0].poll(None), 7)


def test_a_version_damaged_after_its_push_is_requested_again(host: Host) -> None:
    host.trainer.publish(mixed(6))
    taken = host.sync.poll(None)
    assert taken is not None
    host.sync.publish(taken)
    host.sync.verify(taken)
    assert not host.trainer.resend_requested()
    flip_a_bit(host.path, mixed_tensors(6)["embed"])
    with pytest.raises(WeightsCorrupt):
        host.sync.verify(taken)
    host.sync.request_resend()
    assert host.trainer.resend_requested()
    assert host.sync.poll(None) is None
    host.deliver(6)
    assert not host.trainer.resend_requested()
    assert_is(host.generators[0].poll(None), 6)
    for version in range(7, 20):
        host.deliver(version)
        assert not host.trainer.resend_requested()


@pytest.mark.parametrize("damage", ["tensor", "manifest"])
def test_a_version_that_a_restarted_sync_weights_finds_damaged_is_resent(host: Host, damage: str) -> None:
    host.deliver(6)
    if damage == "tensor":
        flip_a_bit(host.path, mixed_tensors(6)["embed"])
    else:
        host.trainer.publish(mixed(7))
        flip_a_bit_of(host.path, b'"policy_version": 7')
    host.sync = ShmRelay(host.path)
    with pytest.raises(WeightsCorrupt):
        host.sync.poll(None)
    host.sync.request_resend()
    # A further start finds the question still open.
    host.sync = ShmRelay(host.path)
    assert host.sync.poll(None) is None
    assert host.trainer.resend_requested()
    host.deliver(7)
    assert_is(host.generators[0].poll(None), 7)


@pytest.mark.parametrize("lost", ["file", "folder"])
def test_a_deleted_file_is_made_again_and_everyone_finds_it(tmp_path: Path, lost: str) -> None:
    folder = tmp_path / "handover"
    folder.mkdir()
    host = Host(folder)
    host.deliver(6)
    assert not host.trainer.resend_requested()
    shutil.rmtree(folder) if lost == "folder" else host.path.unlink()
    host.sync = ShmRelay(host.path)
    assert host.sync.poll(None) is None
    assert host.trainer.resend_requested()
    host.deliver(6)
    assert not host.trainer.resend_requested()
    for generator in host.generators:
        assert_is(generator.poll(None), 6)


def test_a_replaced_trainer_does_not_miss_its_successors_file(host: Host) -> None:
    successor = ShmSender(host.path, mixed_tensors(0), 2)
    assert not host.trainer.resend_requested()
    assert not successor.resend_requested()


def test_a_sync_weights_that_starts_again_pushes_the_same_version_once_more(host: Host) -> None:
    host.deliver(6)
    held = host.generators[0].poll(None)
    host.sync = ShmRelay(host.path)
    host.push()
    assert_is(held, 6)
    assert held is not None
    assert host.generators[0].poll(held.id) is None
    assert_is(host.generators[1].poll(None), 6)


def test_what_anyone_holds_stays_as_it_was_while_twenty_versions_pass(host: Host) -> None:
    host.deliver(0)
    held, followed = host.generators[0].poll(None), host.generators[1].poll(None)
    for version in range(1, 21):
        host.deliver(version)
        assert followed is not None
        followed = host.generators[1].poll(followed.id)
        assert_is(followed, version)
    assert_is(held, 0)
    host.trainer.publish(mixed(21))
    at_sync_weights = host.sync.poll(None)
    for version in range(22, 42):
        host.trainer.publish(mixed(version))
    assert_is(at_sync_weights, 21)
    assert_is(host.generators[0].poll(None), 20)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(3))
def test_a_thousand_offers_find_a_free_slot_whatever_is_held(tmp_path: Path, seed: int) -> None:
    draw, like = random.Random(seed), {"x": torch.zeros(300), "y": torch.zeros(5)}
    host = Host(tmp_path, like=like, num_generators=4)
    held: dict[int, Weights] = {}
    taken = 0
    for version in range(1000):
        host.trainer.publish(
            mixed(version, tensors={name: torch.full_like(each, version) for name, each in like.items()})
        )
        if draw.random() < 0.6:
            host.push()
        for number, generator in enumerate(host.generators):
            # The last one never looks again after its first version.
            if draw.random() < 0.3 and not (number == 3 and 3 in held):
                newer = generator.poll(held[number].id if number in held else None)
                if newer is not None:
                    held[number] = newer
                    taken += 1
            if draw.random() < 0.01:
                host.generators[number] = ShmReceiver(host.path, number) if number != 3 else generator
        for number, each in held.items():
            for name, tensor in each.tensors.items():
                whole = bool((tensor == each.id.policy_version).all())
                assert whole, f"seed {seed}: {name} of {each.id} at generator {number} changed by offer {version}"
    assert taken > 300, f"seed {seed}"
    assert len(held) == 4, f"seed {seed}"


class BrokenOff(dict[str, torch.Tensor]):
    """Tensors whose `head` can't be read."""

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "head":
            raise RuntimeError("the device is gone")
        return super().__getitem__(name)


def test_versions_that_broke_off_half_way_are_never_seen(host: Host) -> None:
    host.trainer.publish(mixed(1))
    for version in range(2, 12):
        with pytest.raises(RuntimeError):
            host.trainer.publish(mixed(version, tensors=BrokenOff(mixed_tensors(version))))
    assert_is(host.sync.poll(None), 1)
    assert_is(ShmRelay(host.path).poll(None), 1)
    host.trainer.publish(mixed(13))
    assert_is(host.sync.poll(mixed(1).id), 13)


def test_there_is_a_free_slot_even_when_every_reader_holds_another(host: Host) -> None:
    for version in range(2):
        host.deliver(version)
        assert_is(host.generators[version].poll(None), version)
    host.deliver(2)
    host.trainer.publish(mixed(3))
    assert_is(host.sync.poll(None), 3)
    host.trainer.publish(mixed(4))
    with pytest.raises(RuntimeError):
        host.trainer.publish(mixed(5, tensors=BrokenOff(mixed_tensors(5))))
    host.trainer.publish(mixed(6))
    assert_is(host.sync.poll(None), 6)


def test_a_slot_that_a_reader_may_be_following_is_not_begun_again_next(host: Host) -> None:
    file = SlotFile(host.path)
    slot = file.free_slot()
    file.begin(slot)
    assert file.free_slot() != slot


class Gated(dict[str, torch.Tensor]):
    """Tensors whose `head` can be read only after the gate has opened."""

    def __init__(self, tensors: Tensors) -> None:
        super().__init__(tensors)
        self.reached, self.gate = threading.Event(), threading.Event()

    def __getitem__(self, name: str) -> torch.Tensor:
        if name == "head":
            self.reached.set()
            self.gate.wait()
        return super().__getitem__(name)


def test_sync_weights_does_not_wait_for_a_trainer_that_stopped_half_way(host: Host) -> None:
    host.trainer.publish(mixed(1))
    tensors = Gated(mixed_tensors(2))
    trainer = threading.Thread(target=host.trainer.publish, args=[mixed(2, tensors=tensors)])
    trainer.start()
    tensors.reached.wait()
    assert_is(host.sync.poll(None), 1)
    assert host.sync.poll(mixed(1).id) is None
    tensors.gate.set()
    trainer.join()
    assert_is(host.sync.poll(mixed(1).id), 2)


def test_other_tensors_than_the_file_was_made_for_are_refused_by_name(host: Host) -> None:
    missing = mixed_tensors(1)
    del missing["norm"]
    with pytest.raises(ValueError, match=r"norm$"):
        host.trainer.publish(mixed(1, tensors=missing))
    # This one could be spread over the right shape.
    with pytest.raises(ValueError, match=r"embed$"):
        host.trainer.publish(mixed(1, tensors={**mixed_tensors(1), "embed": torch.zeros(50)}))
    assert host.sync.poll(None) is None


def test_a_manifest_that_the_slot_has_no_room_for_is_refused(host: Host) -> None:
    endless = Probe(tokens=tuple(range(100_000)), logprobs={})
    with pytest.raises(ValueError):
        host.trainer.publish(Weights(manifest=Manifest(id=mixed(2).id, probe=endless), tensors=mixed_tensors(2)))
    assert host.sync.poll(None) is None
