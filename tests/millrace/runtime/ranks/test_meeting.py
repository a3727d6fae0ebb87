"""Who may join host 0 of a trainer, and who is believed."""

import hmac
import socket
import time
from collections.abc import Iterator
from contextlib import closing

import pytest
from support.campaigns.campaigns import wait_until

from millrace.runtime.ranks import meeting
from millrace.runtime.ranks.meeting import Gathering, Hosts, Link, NotTrusted, refusal

SECRET = b"s" * 32
TWO = {0: "10.0.0.1", 1: "10.0.0.2"}


@pytest.fixture
def gathering() -> Iterator[Gathering]:
    with Gathering("127.0.0.1", SECRET, 3) as gathering:
        yield gathering


def connect(gathering: Gathering) -> socket.socket:
    return socket.create_connection((gathering.address, gathering.port), 5.0)


def test_a_host_that_knows_the_secret_joins_and_both_sides_can_speak(gathering: Gathering) -> None:
    with closing(Link(connect(gathering), SECRET, leads=False)) as link:
        link.send(join=1)
        wait_until(lambda: list(gathering.present()) == [1], "host 1 to have joined")
        gathering.present()[1].send(go={"place": 1})
        assert link.next_message(5.0) == {"go": {"place": 1}}


def test_a_host_with_another_secret_is_refused_and_refuses_host_0(gathering: Gathering) -> None:
    with pytest.raises((NotTrusted, ConnectionError)):
        Link(connect(gathering), b"t" * 32, leads=False)
    assert gathering.present() == {}


def test_sending_back_what_host_0_sends_proves_nothing(gathering: Gathering) -> None:
    with connect(gathering) as echo:
        echo.settimeout(5.0)
        nonce = echo.recv(32)
        echo.sendall(nonce)
        proof = echo.recv(32)
        assert proof == hmac.digest(SECRET, b"leader" + nonce + nonce, "sha256")
        echo.sendall(proof)
        assert echo.recv(1) == b"", "it closes the connection"
    assert gathering.present() == {}


def test_a_silent_connection_blocks_no_other_host(gathering: Gathering) -> None:
    with connect(gathering), closing(Link(connect(gathering), SECRET, leads=False)) as link:
        link.send(join=2)
        wait_until(lambda: list(gathering.present()) == [2], "host 2 to have joined", 3)


def test_a_host_that_joins_again_replaces_its_former_connection(gathering: Gathering) -> None:
    first, second = (Link(connect(gathering), SECRET, leads=False) for _ in range(2))
    with closing(first), closing(second):
        first.send(join=1)
        wait_until(lambda: list(gathering.present()) == [1], "host 1 to have joined")
        second.send(join=1)
        wait_until(first.lost.is_set, "the former connection to end")
        assert list(gathering.present()) == [1]
        assert not second.lost.is_set()


def test_a_host_that_falls_silent_is_lost(gathering: Gathering, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(meeting, "SILENT_SECONDS", 0.5)
    monkeypatch.setattr(meeting, "_BEAT_SECONDS", 60.0)
    began = time.monotonic()
    with closing(Link(connect(gathering), SECRET, leads=False)) as link:
        wait_until(link.lost.is_set, "silence to be noticed", 5)
    assert time.monotonic() - began >= 0.5


@pytest.mark.parametrize(
    ("host", "address", "sentence"),
    [
        (2, "10.0.0.3", None),
        (1, "10.0.0.2", None),
        (3, "10.0.0.3", "there is no host 3 among 3"),
        (0, "10.0.0.3", "there is no host 0 among 3"),
        (None, "10.0.0.3", "there is no host None among 3"),
        (2, "10.0.0.2", "it is the machine of host 1, at 10.0.0.2; expected one job per host: make host LIMIT=1"),
        (1, "10.0.0.1", "it is the machine of host 0, at 10.0.0.1; expected one job per host: make host LIMIT=1"),
    ],
)
def test_a_machine_counts_once_and_only_known_hosts_join(host: object, address: str, sentence: str | None) -> None:
    assert refusal(host, address, TWO, 3) == sentence


def test_on_loopback_all_hosts_may_be_one_machine() -> None:
    assert refusal(1, "127.0.0.1", {0: "127.0.0.1"}, 2) is None


def test_what_a_launcher_is_told_survives_the_command_line() -> None:
    hosts = Hosts(
        run_url="s3://b/r", attempt=1, host=1, hosts=2, min_hosts=1, join_seconds=5.0, network="10.0.0.0/24", ranks=4
    )
    assert Hosts.from_json(hosts.to_json()) == hosts
