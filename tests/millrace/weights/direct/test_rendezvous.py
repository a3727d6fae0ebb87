"""Members that are asked to take part in a push; the test plays the members."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.weights.direct_policies import POLICIES, id_of

from millrace.weights.base import Manifest, Weights
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.direct.rendezvous import Go, Push, Rendezvous, RendezvousClient, generator_name, trainer_name

DEADLINE = 0.8
LONG = 10.0


@pytest.fixture
def relay() -> Iterator[DirectRelay]:
    """For two generators."""
    made = DirectRelay(2, deadline_seconds=DEADLINE)
    yield made
    made.close()


@pytest.fixture
def rendezvous() -> Rendezvous:
    return Rendezvous("127.0.0.1")


def announced(rendezvous: Rendezvous, version: int, *generators: int) -> Push:
    return rendezvous.announce(Manifest(id=id_of(version)), map(generator_name, generators))


def generator(address: str, number: int) -> RendezvousClient:
    return RendezvousClient(address, generator_name(number), LONG)


def trainer(address: str) -> RendezvousClient:
    return RendezvousClient(address, trainer_name(0), LONG, POLICIES["odd"].layout(1))


def version_of(number: int) -> Weights:
    return Weights(manifest=Manifest(id=id_of(number)), tensors={})


def test_a_silent_generator_is_asked_once_and_again_only_after_it_joins_again(relay: DirectRelay) -> None:
    rank, silent = trainer(relay.address), generator(relay.address, 1)
    relay.publish(version_of(1))
    push = silent.next_push()
    assert push is not None
    assert push.asked == ("trainer/0", "generator/1")
    assert rank.next_push() == push
    for version in (2, 3):
        relay.publish(version_of(version))
        assert silent.next_push() is None
    silent.join()
    relay.publish(version_of(4))
    push = silent.next_push()
    assert push is not None
    assert push.id == id_of(4)
    assert relay.missing == {0, 1}


def test_a_push_of_a_version_that_the_trainer_no_longer_holds_is_called_off(relay: DirectRelay) -> None:
    rank, ready = trainer(relay.address), generator(relay.address, 0)
    publishing = threading.Thread(target=relay.publish, args=(version_of(1),))
    publishing.start()
    while (push := rank.next_push()) is None or (asked := ready.next_push()) is None:
        time.sleep(0.005)
    answers: list[Go | None] = []
    answering = threading.Thread(target=lambda: answers.append(ready.ready(asked, None, LONG)))
    answering.start()
    assert rank.ready(push, id_of(2), LONG) is None
    answering.join()
    publishing.join()
    assert answers == [None]
    assert relay.missing == {0, 1}


def test_a_member_sees_each_push_once_and_a_late_one_the_newest_alone(rendezvous: Rendezvous) -> None:
    client = generator(rendezvous.address, 3)
    assert client.next_push() is None
    push = announced(rendezvous, 7, 3, 5)
    assert client.next_push() == push
    assert client.next_push() is None
    newest = announced(rendezvous, 8, 3)
    late = generator(rendezvous.address, 5)
    assert late.next_push() == newest
    assert late.next_push() is None


@pytest.mark.parametrize("members", [(), ("generator/0",)])
def test_a_member_that_answers_after_the_others_went_or_the_end_stays_out(
    rendezvous: Rendezvous, members: tuple[str, ...]
) -> None:
    client = generator(rendezvous.address, 0)
    push = announced(rendezvous, 1, 0)
    assert rendezvous.ready(push, 0.01) == {}
    rendezvous.go(push, Go(group="1", members=members))
    if members:
        rendezvous.finish(push)
    assert client.ready(push, None, LONG) is None


def test_what_members_say_is_read_back(rendezvous: Rendezvous) -> None:
    clients = {g: generator(rendezvous.address, g) for g in (0, 1)}
    push = announced(rendezvous, 1, 0, 1)
    clients[0].done(push)
    clients[1].done(push, "embed differs", damaged=True)
    assert rendezvous.done(push, push.asked, LONG) == {
        "generator/0": {"wrong": "", "damaged": False},
        "generator/1": {"wrong": "embed differs", "damaged": True},
    }
    assert rendezvous.offered("trainer/0") is None
    rank = trainer(rendezvous.address)
    assert rendezvous.layout() == clients[0].layout() == POLICIES["odd"].layout(1)
    assert not rendezvous.offers_changed()
    rank.offer(Manifest(id=id_of(3)), {"embed": 5}, 2)
    assert rendezvous.offers_changed()
    assert not rendezvous.offers_changed()
    offered = rendezvous.offered("trainer/0")
    assert offered == {"manifest": Manifest(id=id_of(3)).to_json(), "sums": {"embed": 5}, "resends": 2}


def test_each_join_has_another_token(rendezvous: Rendezvous) -> None:
    assert rendezvous.token("generator/0") is None
    client = generator(rendezvous.address, 0)
    first = rendezvous.token("generator/0")
    client.join()
    assert first is not None
    assert rendezvous.token("generator/0") not in (None, first)


def test_connecting_where_nothing_listens_is_refused(rendezvous: Rendezvous) -> None:
    address = rendezvous.address
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        generator(address, 0)


def test_strangers_do_not_keep_a_push_from_its_members(rendezvous: Rendezvous) -> None:
    host, port = rendezvous.address.split(":")
    # A TCPStore's client begins with a query of kind 0 with a magic number. Kind 1 sets a key.
    greeting = struct.pack("<BI", 0, 0x3C85F7CE)
    endless_key = greeting + struct.pack("<BQ", 1, 2**60)
    said = [b"", b"GET / HTTP/1.1\r\n\r\n", os.urandom(4096), greeting, endless_key]
    member = generator(rendezvous.address, 0)
    with ExitStack() as strangers:
        for number in range(200):
            stranger = strangers.enter_context(socket.create_connection((host, int(port))))
            stranger.sendall(said[number % len(said)])
        push = announced(rendezvous, 1, 0)
        assert member.next_push() == push
        late = generator(rendezvous.address, 1)
        assert rendezvous.token("generator/1") is not None, "a later member is let in too"
        assert late.next_push() == push
