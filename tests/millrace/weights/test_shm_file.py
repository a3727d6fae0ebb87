"""The handover file: its memory, its reuse by a successor, and its replacement."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from support.weights.shm_host import Host, assert_is
from support.weights.versions import Tensors, mixed, mixed_tensors, sha256

from millrace.errors import WeightsCorrupt
from millrace.weights.shared_tensors import span_bytes
from millrace.weights.shm import MAX_GENERATORS, ShmReceiver, ShmRelay, ShmSender
from millrace.weights.slots import SlotFile
from storage.errors import StoreFull


def test_the_file_takes_the_memory_of_three_copies_while_no_reader_lags(tmp_path: Path) -> None:
    like = {"x": torch.zeros(1_000_000)}
    host = Host(tmp_path, like=like, num_generators=8)
    copy = span_bytes(SlotFile(host.path).shapes)
    for version in range(30):
        host.trainer.publish(mixed(version, tensors=like))
        host.push()
        for generator in host.generators:
            assert generator.poll(None) is not None
    assert host.path.stat().st_size > 9 * copy
    assert host.path.stat().st_blocks * 512 < 3.5 * copy


def test_a_successor_goes_on_with_the_file_of_a_predecessor(tmp_path: Path) -> None:
    first = Host(tmp_path)
    first.deliver(1)
    inode = first.path.stat().st_ino
    first.trainer.close()
    second = Host(tmp_path)
    assert second.path.stat().st_ino == inode
    assert_is(second.generators[0].poll(None), 1)


@pytest.mark.parametrize(
    "other",
    [{"embed": torch.zeros(2, 2)}, {"embed": torch.zeros(70, 50).bfloat16()}, {"another": torch.zeros(2, 2)}],
    ids=["shape", "dtype", "name"],
)
def test_weights_of_another_make_get_a_file_of_their_own_and_readers_find_it(tmp_path: Path, other: Tensors) -> None:
    like = mixed_tensors(0) | other
    first = Host(tmp_path)
    first.deliver(1)
    held = first.generators[0].poll(None)
    first.trainer.close()
    trainer = ShmSender(first.path, like, 2)
    assert first.generators[0].poll(None) is None
    assert first.sync.poll(None) is None
    trainer.publish(mixed(2, tensors=like))
    first.push()
    taken = first.generators[0].poll(None)
    assert taken is not None
    assert sha256(taken.tensors) == sha256(like)
    assert_is(held, 1)


def test_a_generator_that_the_file_has_no_place_for_waits_for_the_next_file(tmp_path: Path) -> None:
    first = Host(tmp_path, num_generators=1)
    first.deliver(1)
    newcomer = ShmReceiver(first.path, 1)
    assert newcomer.poll(None) is None
    first.trainer.close()
    second = Host(tmp_path, num_generators=2)
    second.deliver(2)
    assert_is(newcomer.poll(None), 2)
    newcomer.close()


def test_a_predecessor_that_still_writes_reaches_no_reader(tmp_path: Path) -> None:
    frozen = Host(tmp_path)
    frozen.deliver(1)
    successor = Host(tmp_path)
    frozen.trainer.publish(mixed(2))
    assert successor.sync.poll(None) is None
    successor.trainer.publish(mixed(1, incarnation=1))
    assert_is(successor.sync.poll(None), 1, incarnation=1)


@pytest.mark.parametrize("content", [b"no weights" * 1000, b""])
def test_a_foreign_file_is_ignored_and_replaced_by_the_trainer(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "handover"
    path.write_bytes(content)
    for reader in (ShmRelay(path), ShmReceiver(path, 0)):
        assert reader.poll(None) is None
    with pytest.raises(WeightsCorrupt):
        SlotFile(path)
    host = Host(tmp_path)
    host.deliver(1)
    assert_is(host.generators[0].poll(None), 1)


def _overwritten(path: Path) -> None:
    with path.open("r+b") as file:
        file.write(b"\xa5" * 4096)


@pytest.mark.parametrize(
    "damage",
    [*(lambda path, kept=kept: os.truncate(path, kept) for kept in (0, 100, 5000)), _overwritten],
    ids=["empty", "within the header", "within the shapes", "header overwritten"],
)
def test_a_file_damaged_in_use_is_replaced_with_the_last_version(
    tmp_path: Path, damage: Callable[[Path], object]
) -> None:
    host = Host(tmp_path)
    host.deliver(1)
    assert not host.trainer.resend_requested()
    damage(host.path)
    assert host.sync.poll(None) is None
    assert host.generators[0].poll(None) is None
    assert host.trainer.resend_requested()
    host.deliver(1)
    assert not host.trainer.resend_requested()
    assert_is(host.generators[0].poll(None), 1)


def test_more_generators_than_the_file_has_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError):
        Host(tmp_path, num_generators=MAX_GENERATORS + 1)
    host = Host(tmp_path, num_generators=MAX_GENERATORS)
    host.deliver(0)
    assert_is(host.generators[MAX_GENERATORS - 1].poll(None), 0)


def test_too_little_memory_is_reported_before_the_first_version(make_small_disk: Callable[[int], Path]) -> None:
    with pytest.raises(StoreFull):
        Host(make_small_disk(8), like={"x": torch.zeros(1_000_000)})
