"""Which generators are asked to take part in a push, and which no longer; the test plays the generators."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from support.weights.broadcasting import wait_until, weights_of

from millrace.weights.broadcast import BroadcastReader, BroadcastWriter
from millrace.weights.rendezvous import Go, Push, Rendezvous, RendezvousClient
from millrace.weights.shared_tensors import shapes_of

DEADLINE = 0.8
LONG = 10.0


@pytest.fixture
def writer() -> Iterator[BroadcastWriter]:
    """For two generators."""
    made = BroadcastWriter(2, deadline_seconds=DEADLINE)
    yield made
    made.close()


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous("127.0.0.1")


def announced(rendezvous: Rendezvous, version: int, *asked: int) -> Push:
    weights = weights_of(version)
    return rendezvous.announce(weights.manifest, shapes_of(weights.tensors), asked)


def test_a_silent_generator_is_asked_once_and_again_only_after_it_joins_again(
    writer: BroadcastWriter,
) -> None:
    silent = RendezvousClient(writer.address, 1, LONG)
    writer.offer(weights_of(1))
    asked = silent.next_push()
    assert asked is not None
    assert asked.asked == (1,)
    for version in (2, 3):
        writer.offer(weights_of(version))
        assert silent.next_push() is None
    silent.join()
    writer.offer(weights_of(4))
    asked = silent.next_push()
    assert asked is not None
    assert (asked.asked, asked.manifest) == ((1,), weights_of(4).manifest)
    assert writer.missing == {0, 1}


def test_a_push_goes_on_with_those_that_are_ready(writer: BroadcastWriter, tmp_path: Path) -> None:
    silent = RendezvousClient(writer.address, 1, LONG)
    reader = BroadcastReader(lambda: writer.address, 0, tmp_path / "received", deadline_seconds=LONG)

    def offered() -> bool:
        writer.offer(weights_of(1))
        return 0 not in writer.missing

    wait_until(offered, "generator 0 has it")
    assert silent.next_push() is not None
    writer.offer(weights_of(2))
    push = silent.next_push()
    assert push is not None
    assert push.asked == (0,)
    assert writer.missing == {1}
    taken = reader.take(None)
    assert taken is not None
    assert taken.id == weights_of(2).id
    reader.close()


def test_a_push_holds_all_that_a_generator_must_know(rendezvous: Rendezvous) -> None:
    client = RendezvousClient(rendezvous.address, 3, LONG)
    assert client.next_push() is None
    push = announced(rendezvous, 7, 3, 5)
    assert client.next_push() == push
    assert client.next_push() is None


def test_a_late_generator_sees_the_newest_push_alone(rendezvous: Rendezvous) -> None:
    announced(rendezvous, 1, 0)
    newest = announced(rendezvous, 2, 0)
    client = RendezvousClient(rendezvous.address, 0, LONG)
    assert client.next_push() == newest
    assert client.next_push() is None


def test_a_generator_that_answers_after_the_others_went_is_told_so(rendezvous: Rendezvous) -> None:
    client = RendezvousClient(rendezvous.address, 0, LONG)
    push = announced(rendezvous, 1, 0)
    assert rendezvous.ready(push, 0.01) == {}
    rendezvous.go(push, Go(group="1", ranks={}))
    assert client.ready(push, LONG) is None


def test_a_generator_that_wakes_after_a_push_is_over_stays_out_of_its_group(rendezvous: Rendezvous) -> None:
    client = RendezvousClient(rendezvous.address, 0, LONG)
    push = announced(rendezvous, 1, 0)
    rendezvous.go(push, Go(group="1", ranks={0: 1}))
    rendezvous.over(push)
    assert client.ready(push, LONG) is None


def test_answers_reach_sync_weights(rendezvous: Rendezvous) -> None:
    clients = {g: RendezvousClient(rendezvous.address, g, LONG) for g in (0, 1)}
    push = announced(rendezvous, 1, 0, 1)
    clients[0].done(push)
    clients[1].done(push, "embed differs")
    assert rendezvous.done(push, [0, 1], LONG) == {0: "", 1: "embed differs"}


def test_each_join_has_another_token(rendezvous: Rendezvous) -> None:
    assert rendezvous.joined(0) is None
    client = RendezvousClient(rendezvous.address, 0, LONG)
    first = rendezvous.joined(0)
    client.join()
    assert None not in (first, rendezvous.joined(0))
    assert first != rendezvous.joined(0)


def test_connecting_where_nothing_listens_is_refused(rendezvous: Rendezvous) -> None:
    address = rendezvous.address
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        RendezvousClient(address, 0, LONG)
