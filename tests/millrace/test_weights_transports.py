"""The contract of `weights/base.py`, run against every transport, and what shared memory adds to it."""

import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from millrace.errors import WeightsCorrupt
from millrace.weights.base import Weights, WeightsId, WeightsReader, WeightsWriter
from millrace.weights.factory import generator_end, handover_end, push_end, trainer_end
from millrace.weights.shm import MAX_READERS, ShmReader, ShmWriter
from storage.local import LocalStore

READER_PROCESS = Path(__file__).with_name("take_until_version.py")
VERSIONS = 300


def tensors(seed: int) -> dict[str, torch.Tensor]:
    """Of several types and odd sizes, so that none begins where it likes to."""
    random = torch.Generator().manual_seed(seed)
    return {
        "scale": torch.randn((), generator=random),
        "norm": torch.randn(3, generator=random).bfloat16(),
        "embed": torch.randn(7, 5, generator=random),
        "head": torch.randn(5, 3, 2, generator=random).half(),
        "bias": torch.randn(4, generator=random).double(),
    }


def weights(policy_version: int, incarnation: int = 0) -> Weights:
    weights_id = WeightsId(incarnation=incarnation, policy_version=policy_version, t_offered=policy_version + 0.5)
    return Weights(id=weights_id, tensors=tensors(policy_version + 1000 * incarnation))


@dataclass(frozen=True)
class Transport:
    folder: Path
    """Where all of it lies."""
    open_writer: Callable[[], WeightsWriter]
    open_reader: Callable[[], WeightsReader]


@pytest.fixture(params=["handover", "shm", "store"])
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Transport:
    store, like = LocalStore(tmp_path / "run", fsync=False), tensors(0)
    if request.param == "handover":
        return Transport(tmp_path, lambda: trainer_end(tmp_path, like), lambda: handover_end(tmp_path))
    return Transport(
        tmp_path,
        lambda: push_end(request.param, store, tmp_path, like, 2),
        lambda: generator_end(request.param, store, tmp_path, 1),
    )


def assert_taken(taken: Weights | None, expected: Weights) -> None:
    """That every bit of `expected` arrived."""
    assert taken is not None
    assert taken.id == expected.id
    assert taken.tensors.keys() == expected.tensors.keys()
    assert taken.nbytes == expected.nbytes
    for name, tensor in expected.tensors.items():
        assert taken.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(taken.tensors[name], tensor), name


def test_there_is_nothing_to_take_before_anything_was_offered(transport: Transport) -> None:
    reader = transport.open_reader()
    assert reader.take(None) is None
    transport.open_writer()
    assert reader.take(None) is None


def test_every_tensor_arrives_bit_for_bit_whatever_its_type(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    writer.offer(weights(0))
    assert_taken(reader.take(None), weights(0))


def test_a_tensor_arrives_whatever_its_layout_in_memory_was(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    transposed = {
        name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in tensors(4).items()
    }
    assert not transposed["embed"].is_contiguous()
    expected = weights(4)
    writer.offer(Weights(id=expected.id, tensors=transposed))
    assert_taken(reader.take(None), expected)


def test_a_reader_sees_the_newest_only(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    for version in range(6):
        writer.offer(weights(version))
    assert_taken(reader.take(None), weights(5))


def test_there_is_nothing_to_take_when_nothing_is_newer(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    writer.offer(weights(3))
    assert reader.take(weights(3).id) is None
    assert reader.take(weights(4).id) is None
    writer.offer(weights(4))
    assert_taken(reader.take(weights(3).id), weights(4))


def test_a_later_incarnation_is_newer_than_any_version_of_an_earlier_one(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    writer.offer(weights(9))
    assert_taken(reader.take(None), weights(9))
    writer.offer(weights(3, incarnation=1))
    assert_taken(reader.take(weights(9).id), weights(3, incarnation=1))
    writer.offer(weights(10))
    assert reader.take(weights(3, incarnation=1).id) is None


def test_a_late_reader_finds_the_newest(transport: Transport) -> None:
    writer = transport.open_writer()
    writer.offer(weights(1))
    writer.offer(weights(2))
    writer.close()
    assert_taken(transport.open_reader().take(None), weights(2))


def test_a_reader_that_opens_again_goes_on_where_it_was(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    writer.offer(weights(1))
    taken = reader.take(None)
    assert taken is not None
    reader.close()
    again = transport.open_reader()
    assert again.take(taken.id) is None
    writer.offer(weights(2))
    assert_taken(again.take(taken.id), weights(2))


def test_a_reader_follows_a_writer_that_opens_again(transport: Transport) -> None:
    reader = transport.open_reader()
    first = transport.open_writer()
    first.offer(weights(1))
    assert_taken(reader.take(None), weights(1))
    first.close()
    second = transport.open_writer()
    assert_taken(reader.take(None), weights(1))
    second.offer(weights(2, incarnation=1))
    assert_taken(reader.take(weights(1).id), weights(2, incarnation=1))


def test_what_was_offered_does_not_change_with_the_tensors_it_was_made_from(transport: Transport) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    live = weights(1)
    writer.offer(live)
    for tensor in live.tensors.values():
        tensor.zero_()
    assert_taken(reader.take(None), weights(1))


@pytest.mark.parametrize("name", ["norm", "embed", "bias"])
def test_a_flipped_bit_is_corrupt_and_says_which_version(transport: Transport, name: str) -> None:
    writer, reader = transport.open_writer(), transport.open_reader()
    writer.offer(weights(6))
    flip_a_bit(transport.folder, weights(6).tensors[name].view(torch.uint8).numpy().tobytes())
    with pytest.raises(WeightsCorrupt, match="weights of version 6 "):
        reader.take(None)
    writer.offer(weights(7))
    assert_taken(reader.take(None), weights(7))


def flip_a_bit(folder: Path, content: bytes) -> None:
    """In the one place below `folder` where `content` lies."""
    places = [(path, path.read_bytes().find(content)) for path in folder.rglob("*") if path.is_file()]
    ((path, offset),) = [(path, offset) for path, offset in places if offset >= 0]
    with path.open("r+b") as file:
        file.seek(offset)
        file.write(bytes([content[0] ^ 1]))


def test_what_a_reader_holds_stays_whole_however_many_versions_follow(tmp_path: Path) -> None:
    writer = ShmWriter(tmp_path / "weights", tensors(0), num_readers=2)
    holder, follower = (ShmReader(tmp_path / "weights", reader) for reader in range(2))
    writer.offer(weights(0))
    held, followed = holder.take(None), follower.take(None)
    for version in range(1, 30):
        writer.offer(weights(version))
        assert followed is not None
        followed = follower.take(followed.id)
        assert_taken(followed, weights(version))
    assert_taken(held, weights(0))


def test_a_reader_that_died_is_forgotten_once_it_opens_again(tmp_path: Path) -> None:
    writer = ShmWriter(tmp_path / "weights", tensors(0), num_readers=1)
    for version in range(5):
        writer.offer(weights(version))
        # Left open and never closed, as by a killed process.
        assert_taken(ShmReader(tmp_path / "weights", 0).take(None), weights(version))


def test_weights_of_another_make_get_a_file_of_their_own(tmp_path: Path) -> None:
    ShmWriter(tmp_path / "weights", tensors(0), num_readers=1).offer(weights(1))
    other = {"embed": torch.ones(2, 2)}
    writer = ShmWriter(tmp_path / "weights", other, num_readers=1)
    reader = ShmReader(tmp_path / "weights", 0)
    assert reader.take(None) is None
    expected = Weights(id=weights(2).id, tensors=other)
    writer.offer(expected)
    assert_taken(reader.take(None), expected)


def test_a_file_that_is_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "weights").write_bytes(b"no weights" * 1000)
    with pytest.raises(WeightsCorrupt, match="not a shared-memory weights file"):
        ShmReader(tmp_path / "weights", 0).take(None)


def test_more_readers_than_the_file_has_room_for_are_refused(tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=f"at most {MAX_READERS} readers share one weights file, not {MAX_READERS + 1}"
    ):
        ShmWriter(tmp_path / "weights", tensors(0), num_readers=MAX_READERS + 1)
    ShmWriter(tmp_path / "weights", tensors(0), num_readers=MAX_READERS).offer(weights(0))
    assert_taken(ShmReader(tmp_path / "weights", MAX_READERS - 1).take(None), weights(0))


def test_two_processes_take_whole_versions_in_order_while_the_writer_never_waits_for_them(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    shapes = {"big": torch.zeros(500_000), "small": torch.zeros(3, dtype=torch.bfloat16)}
    arguments = [
        [sys.executable, str(READER_PROCESS), str(path), str(reader), str(VERSIONS - 1)] for reader in range(2)
    ]
    writer = ShmWriter(path, shapes, num_readers=2)
    readers = [subprocess.Popen(each, stdout=subprocess.PIPE, text=True) for each in arguments]
    try:
        for reader in readers:
            assert reader.stdout is not None
            assert reader.stdout.readline() == "ready\n"
        for version in range(VERSIONS):
            filled = {name: torch.full_like(tensor, version) for name, tensor in shapes.items()}
            writer.offer(Weights(id=weights(version).id, tensors=filled))
        counts = [int(reader.communicate()[0]) for reader in readers]
    finally:
        for reader in readers:
            reader.kill()
            reader.wait()
    assert [reader.returncode for reader in readers] == [0, 0]
    assert all(1 <= count <= VERSIONS for count in counts)
