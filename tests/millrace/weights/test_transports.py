"""The contract of `weights/base.py`, run against every transport.

A transport joins by one line in TRANSPORTS. Its readers take the manifest and the tensors that its writer published.
"""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from support.weights.direct_ends import direct_ends
from support.weights.versions import manifest_of, mixed, mixed_tensors

from millrace.weights.base import Weights, WeightsReceiver, WeightsSender
from millrace.weights.fingerprint import fingerprint
from millrace.weights.shm import ShmReceiver, ShmRelay, ShmSender

GENERATORS = 2


class ShmChain(WeightsSender):
    """Everything between the trainer and the readers of `shm`, as one writer."""

    def __init__(self, path: Path) -> None:
        self._trainer = ShmSender(path, mixed_tensors(0), GENERATORS)
        self._relay = ShmRelay(path)

    def publish(self, weights: Weights) -> None:
        self._trainer.publish(weights)
        taken = self._relay.poll(None)
        assert taken is not None
        self._relay.publish(taken)

    def close(self) -> None:
        self._relay.close()
        self._trainer.close()


class Transport:
    """Opens ends, and closes those that the test left open."""

    def __init__(self, writer: Callable[[], WeightsSender], reader: Callable[[int], WeightsReceiver]) -> None:
        self._open_writer = writer
        self._open_reader = reader
        self.open = ExitStack()

    def writer(self) -> WeightsSender:
        return self.open.enter_context(closing(self._open_writer()))

    def reader(self, generator: int = 1) -> WeightsReceiver:
        return self.open.enter_context(closing(self._open_reader(generator)))


TRANSPORTS: dict[str, Callable[[Path], Transport]] = {
    "direct": lambda folder: Transport(*direct_ends(folder, GENERATORS)),
    "shm": lambda folder: Transport(lambda: ShmChain(folder / "weights"), lambda g: ShmReceiver(folder / "weights", g)),
}


@pytest.fixture(params=sorted(TRANSPORTS))
def transport(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Transport]:
    transport = TRANSPORTS[request.param](tmp_path)
    with transport.open:
        yield transport


def assert_taken(taken: Weights | None, version: int, incarnation: int = 0) -> None:
    """That this version arrived, every bit of it, for this process and for others."""
    assert taken is not None
    expected = mixed_tensors(version, incarnation)
    said = dataclasses.replace(taken.manifest, fingerprint=None)
    assert said == manifest_of(version, incarnation), f"expected version {version}, found {taken.id}"
    # Of whole tensors, or of their parts.
    assert taken.fingerprint == fingerprint(expected, taken.fingerprint.boxes)
    assert fingerprint(taken.tensors) == fingerprint(expected)
    assert taken.shared is not None
    assert fingerprint(taken.shared.map()) == fingerprint(expected)


def test_a_poll_before_the_first_version_returns_nothing(transport: Transport) -> None:
    reader = transport.reader()
    assert reader.poll(None) is None
    transport.writer()
    assert reader.poll(None) is None


def test_a_tensor_arrives_whatever_its_layout_in_memory_was(transport: Transport) -> None:
    writer, reader = transport.writer(), transport.reader()
    transposed = {
        name: tensor.mT.contiguous().mT if tensor.dim() > 1 else tensor for name, tensor in mixed_tensors(4).items()
    }
    assert not transposed["embed"].is_contiguous()
    writer.publish(mixed(4, tensors=transposed))
    assert_taken(reader.poll(None), 4)


def test_every_reader_takes_for_itself(transport: Transport) -> None:
    writer, readers = transport.writer(), [transport.reader(generator) for generator in range(GENERATORS)]
    writer.publish(mixed(1))
    first = readers[0].poll(None)
    assert_taken(first, 1)
    assert_taken(readers[1].poll(None), 1)
    writer.publish(mixed(2))
    assert_taken(readers[0].poll(mixed(1).id), 2)
    assert_taken(readers[1].poll(mixed(1).id), 2)


def test_early_and_late_readers_take_only_the_newest(transport: Transport) -> None:
    writer, reader = transport.writer(), transport.reader()
    for version in range(6):
        writer.publish(mixed(version))
    assert_taken(reader.poll(None), 5)
    assert_taken(transport.reader(generator=0).poll(None), 5)


def test_an_older_version_is_not_taken(transport: Transport) -> None:
    writer, reader = transport.writer(), transport.reader()
    writer.publish(mixed(3))
    assert reader.poll(mixed(3).id) is None
    assert reader.poll(mixed(4).id) is None
    writer.publish(mixed(4))
    assert_taken(reader.poll(mixed(3).id), 4)


def test_a_later_incarnation_is_newer_than_any_version_of_an_earlier_one(transport: Transport) -> None:
    writer, reader = transport.writer(), transport.reader()
    writer.publish(mixed(9))
    assert_taken(reader.poll(None), 9)
    writer.publish(mixed(3, incarnation=1))
    assert_taken(reader.poll(mixed(9).id), 3, incarnation=1)
    assert reader.poll(mixed(3, incarnation=1).id) is None


def test_a_reopened_reader_takes_only_newer_versions(transport: Transport) -> None:
    writer, reader = transport.writer(), transport.reader()
    writer.publish(mixed(1))
    assert_taken(reader.poll(None), 1)
    reader.close()
    again = transport.reader()
    assert again.poll(mixed(1).id) is None
    writer.publish(mixed(2))
    assert_taken(again.poll(mixed(1).id), 2)


def test_a_reader_follows_a_writer_that_opens_again(transport: Transport) -> None:
    reader, first = transport.reader(), transport.writer()
    first.publish(mixed(1))
    assert_taken(reader.poll(None), 1)
    first.close()
    second = transport.writer()
    assert reader.poll(mixed(1).id) is None
    second.publish(mixed(2, incarnation=1))
    assert_taken(reader.poll(mixed(1).id), 2, incarnation=1)


def test_a_published_version_does_not_change_with_its_source_tensors(transport: Transport) -> None:
    writer, reader = transport.writer(), transport.reader()
    live = mixed(1)
    writer.publish(live)
    for tensor in live.tensors.values():
        tensor.zero_()
    assert_taken(reader.poll(None), 1)
