"""Members that are invited to take part in a push; the test plays the members."""

import os
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack

import pytest
from support.weights.direct_policies import POLICIES, id_of

from millrace.weights.base import Manifest
from millrace.weights.direct.relay import DirectRelay
from millrace.weights.direct.rendezvous import (
    Offer,
    Push,
    PushRendezvous,
    RendezvousClient,
    generator_name,
    trainer_name,
)

DEADLINE = 0.8
LONG = 10.0
LAYOUT = POLICIES["odd"].layout(1)
HASHES = {spec.name: "0" for spec in LAYOUT.tensors}


@pytest.fixture
def relay() -> Iterator[DirectRelay]:
    """For two generators."""
    made = DirectRelay(2, deadline_seconds=DEADLINE)
    yield made
    made.close()


@pytest.fixture
def rendezvous() -> PushRendezvous:
    return PushRendezvous("127.0.0.1")


def announced(rendezvous: PushRendezvous, version: int, *generators: int) -> Push:
    return rendezvous.announce(Manifest(id=id_of(version)), LAYOUT, map(generator_name, generators), "direct")


def generator(address: str, number: int) -> RendezvousClient:
    return RendezvousClient(address, generator_name(number), LONG)


def publish(relay: DirectRelay, rank: RendezvousClient, version: int) -> None:
    """Has the trainer's only rank offer a version, and the relay push it."""
    rank.offer(Offer(manifest=Manifest(id=id_of(version)), layout=LAYOUT, hashes=HASHES))
    offered = relay.poll(None)
    assert offered is not None
    relay.publish(offered)


def test_a_silent_generator_is_asked_again_only_after_another_request(relay: DirectRelay) -> None:
    rank, silent = (RendezvousClient(relay.address, name, LONG) for name in (trainer_name(0), generator_name(1)))
    silent.request(None)
    publish(relay, rank, 1)
    push = silent.next_push()
    assert push is not None
    assert push.invited == ("trainer/0", "generator/1")
    assert rank.next_push() == push
    for version in (2, 3):
        publish(relay, rank, version)
        assert silent.next_push() is None
    silent.request(None)
    publish(relay, rank, 4)
    push = silent.next_push()
    assert push is not None
    assert push.manifest.id == id_of(4)
    assert relay.missing == {0, 1}
    silent.request(id_of(4))
    assert relay.missing == {0}


def test_a_push_of_a_version_that_the_trainer_no_longer_holds_is_called_off(relay: DirectRelay) -> None:
    rank, member = (RendezvousClient(relay.address, name, LONG) for name in (trainer_name(0), generator_name(0)))
    member.request(None)
    publishing = threading.Thread(target=publish, args=(relay, rank, 1))
    publishing.start()
    while (push := rank.next_push()) is None or (invited := member.next_push()) is None:
        time.sleep(0.005)
    answers: list[dict[str, str]] = []
    answering = threading.Thread(target=lambda: answers.append(member.ready(invited, "a session", LONG)))
    answering.start()
    assert rank.ready(push, "", LONG) == {}
    answering.join()
    publishing.join()
    assert answers == [{}]
    assert relay.missing == {0, 1}


def test_a_member_sees_each_push_once_and_a_late_one_the_newest_alone(rendezvous: PushRendezvous) -> None:
    client = generator(rendezvous.address, 3)
    assert client.next_push() is None
    push = announced(rendezvous, 7, 3, 5)
    assert client.next_push() == push
    assert client.next_push() is None
    newest = announced(rendezvous, 8, 3)
    late = generator(rendezvous.address, 5)
    assert late.next_push() == newest
    assert late.next_push() is None


def test_a_member_that_answers_after_the_end_of_a_push_stays_out(rendezvous: PushRendezvous) -> None:
    client = generator(rendezvous.address, 0)
    push = announced(rendezvous, 1, 0)
    assert rendezvous.answers("ready", push, push.invited, 0.01) == {}
    rendezvous.go(push, dict.fromkeys(push.invited, "a session"))
    rendezvous.finish(push)
    assert client.ready(push, "a session", LONG) == {}


def test_what_members_say_is_read_back(rendezvous: PushRendezvous) -> None:
    clients = {g: generator(rendezvous.address, g) for g in (0, 1)}
    push = announced(rendezvous, 1, 0, 1)
    clients[0].done(push)
    clients[1].done(push, "embed differs", damage="embed differs")
    assert rendezvous.answers("done", push, push.invited, LONG) == {
        "generator/0": {"error": "", "damage": ""},
        "generator/1": {"error": "embed differs", "damage": "embed differs"},
    }
    assert rendezvous.offer(0) is None
    rank = RendezvousClient(rendezvous.address, trainer_name(0), LONG)
    assert not rendezvous.offers_changed()
    offer = Offer(manifest=Manifest(id=id_of(3)), layout=LAYOUT, hashes=HASHES)
    rank.offer(offer)
    assert rendezvous.offers_changed()
    assert not rendezvous.offers_changed()
    assert rendezvous.offer(0) == offer
    assert rank.is_offered()
    rendezvous.drop_offer(0)
    assert not rank.is_offered()


def test_only_the_keys_of_the_last_push_are_kept(rendezvous: PushRendezvous) -> None:
    counts = set()
    for version in range(1, 5):
        push = announced(rendezvous, version, 0, 1)
        for number in (0, 1):
            generator(rendezvous.address, number).done(push)
        rendezvous.finish(push)
        counts.add(rendezvous.store.num_keys())
    assert len(counts) == 1


def test_connecting_where_nothing_listens_is_refused(rendezvous: PushRendezvous) -> None:
    address = rendezvous.address
    rendezvous.close()
    with pytest.raises(ConnectionRefusedError):
        generator(address, 0)


def test_strangers_do_not_keep_a_push_from_its_members(rendezvous: PushRendezvous) -> None:
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
        late.request(None)
        assert rendezvous.request(1) == {"held": None}, "a later member is let in too"
        assert late.next_push() == push
