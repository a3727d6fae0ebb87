"""Both ends of a broadcast, in one process: who gets what, what is refused, and how long it stays as it is."""

import dataclasses
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
from support.weights.broadcasting import (
    assert_is,
    broadcast_reader,
    broadcast_writer,
    offer_and_tend,
    tend_until_missing,
    tensors_of,
    wait_until,
    weights_of,
)

from millrace.errors import InputError, WeightsCorrupt
from millrace.weights.broadcast import BroadcastReader, BroadcastWriter

DEADLINE = 3.0


@pytest.fixture
def make_writer(tmp_path: Path) -> Iterator[Callable[[int], BroadcastWriter]]:
    """`make(num_generators)`: sync_weights' end in this process, found by all generators of this folder."""
    with ExitStack() as stack:

        def make(num_generators: int) -> BroadcastWriter:
            return stack.enter_context(broadcast_writer(tmp_path, num_generators, deadline_seconds=DEADLINE))

        yield make


@pytest.fixture
def make_reader(tmp_path: Path) -> Iterator[Callable[[int], BroadcastReader]]:
    """`make(generator)`: a generator's end in this process."""
    with ExitStack() as stack:

        def make(number: int) -> BroadcastReader:
            return stack.enter_context(broadcast_reader(tmp_path, number, deadline_seconds=DEADLINE))

        yield make


def test_a_generator_that_never_came_is_missing_and_served_when_it_comes(
    make_writer: Callable[[int], BroadcastWriter], make_reader: Callable[[int], BroadcastReader]
) -> None:
    writer, reader = make_writer(2), make_reader(1)
    assert writer.missing == {0, 1}
    writer.offer(weights_of(1))
    assert 0 in writer.missing

    tend_until_missing(writer, {0})
    assert_is(reader.take(None), 1)
    late = make_reader(0)
    tend_until_missing(writer, set())
    assert_is(late.take(None), 1)


def test_what_was_taken_stays_as_it_is_while_newer_versions_arrive_and_the_newest_is_taken_next(
    make_writer: Callable[[int], BroadcastWriter], make_reader: Callable[[int], BroadcastReader]
) -> None:
    writer, reader = make_writer(1), make_reader(0)
    offer_and_tend(writer, 1)
    taken = reader.take(None)
    for version in range(2, 8):
        writer.offer(weights_of(version))
        assert writer.missing == set()
        assert_is(taken, 1)
    assert taken is not None
    assert_is(reader.take(taken.id), 7)


def test_what_is_not_newer_is_not_taken_though_it_came(
    make_writer: Callable[[int], BroadcastWriter], make_reader: Callable[[int], BroadcastReader]
) -> None:
    writer, reader = make_writer(1), make_reader(0)
    assert reader.take(weights_of(5).id) is None
    offer_and_tend(writer, 5)
    assert reader.take(weights_of(5).id) is None
    offer_and_tend(writer, 6)
    assert_is(reader.take(weights_of(5).id), 6)


def test_weights_that_are_not_what_their_fingerprint_says_are_refused_until_better_ones_come(
    make_writer: Callable[[int], BroadcastWriter], make_reader: Callable[[int], BroadcastReader]
) -> None:
    writer, reader = make_writer(1), make_reader(0)
    offer_and_tend(writer, 1)
    assert_is(taken := reader.take(None), 1)
    assert taken is not None
    writer.offer(dataclasses.replace(weights_of(2), tensors=tensors_of(3)))
    assert writer.missing == {0}
    with pytest.raises(
        WeightsCorrupt, match=r"version 2 received by broadcast are damaged: bias, embed, head, norm, scale"
    ):
        reader.take(taken.id)
    assert reader.take(taken.id) is None
    writer.offer(weights_of(3))
    assert_is(reader.take(taken.id), 3)


def test_weights_without_a_fingerprint_are_not_sent(make_writer: Callable[[int], BroadcastWriter]) -> None:
    weights = weights_of(1)
    bare = dataclasses.replace(weights, manifest=dataclasses.replace(weights.manifest, fingerprint=None))
    with pytest.raises(ValueError, match="version 1 has no fingerprint"):
        make_writer(1).offer(bare)


def test_an_address_that_is_not_of_this_machine_is_refused_in_a_sentence() -> None:
    with pytest.raises(InputError, match=r"weights\.host: can't listen at 192\.0\.2\.1; expected an address"):
        BroadcastWriter(1, host="192.0.2.1", deadline_seconds=DEADLINE)


def test_what_the_thread_can_not_deal_with_is_raised_by_take(tmp_path: Path) -> None:
    def find() -> str | None:
        raise PermissionError("the store says no")

    reader = BroadcastReader(find, 0, tmp_path / "received", deadline_seconds=DEADLINE)

    def raised() -> bool:
        try:
            reader.take(None)
        except PermissionError:
            return True
        return False

    wait_until(raised, "the thread's error")
    reader.close()


def test_generators_find_the_successor_of_a_sync_weights_that_closed(
    make_writer: Callable[[int], BroadcastWriter], make_reader: Callable[[int], BroadcastReader]
) -> None:
    first, reader = make_writer(1), make_reader(0)
    offer_and_tend(first, 1)
    assert_is(taken := reader.take(None), 1)
    assert taken is not None
    second = make_writer(1)
    first.close()
    assert reader.take(taken.id) is None
    offer_and_tend(second, 2)
    assert_is(reader.take(taken.id), 2)
