"""How the launchers of a trainer's hosts find each other, prove that they know the run's secret, and stay connected.

    host 0 ──address, port, secret──► the run's store ──► host n

    host 0 │ ◄── 32 random bytes each ──► │ host n
           │ ◄── HMAC-SHA256 of role, own bytes, other's bytes, under the secret ──► │
           │ ◄── JSON, a line a message; an empty one every 2 s ──► │

The secret itself is never sent. What follows the proofs is neither encrypted nor signed.
"""

import contextlib
import hmac
import json
import queue
import secrets
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Self

from storage import layout
from storage.errors import NotInStore, StorageError
from storage.stores.base import Store

_NONCE_BYTES = 32
_GREETING_SECONDS = 5.0
_BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""A launcher that has sent nothing for this long counts as lost. Shorter cuts of the network are survived."""
_MAX_LINE = 1 << 16
_LOOPBACK = "127."


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of one trainer, as the launcher of each gets them on its command line."""

    run_url: str
    """Where the run is stored; there the hosts find the leading one."""
    attempt: int
    host: int
    """This host, in [0, hosts); host 0 leads."""
    hosts: int
    min_hosts: int
    """With how many to start while others are missing, in [1, hosts]."""
    join_seconds: float
    """How long to wait for the missing ones before that."""
    network: str
    """In which they reach each other, such as 10.0.0.0/24."""
    ranks: int
    """Ranks of each host."""

    def to_json(self) -> str:
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Self:
        return cls(**json.loads(text))


@dataclass(frozen=True, kw_only=True)
class LeaderAddress:
    """Where the launcher of host 0 is, as long as it lives."""

    attempt: int
    address: str
    port: int
    secret: str
    """In hexadecimal; another one for each launcher."""

    def publish(self, store: Store) -> None:
        """Replaces the address of a former launcher. Raises StorageError."""
        store.put(layout.TRAINER_HOSTS, json.dumps(asdict(self)).encode())

    @classmethod
    def find(cls, store: Store, attempt: int) -> Self | None:
        """The address that host 0 of this attempt has published; None if none, or if the store can't be reached now."""
        try:
            leader = cls(**json.loads(bytes(store.get(layout.TRAINER_HOSTS))))
        except (NotInStore, StorageError, OSError, ValueError):
            return None
        return leader if leader.attempt == attempt else None


class NotTrusted(ConnectionError):
    """The other side does not know the secret."""


class Link:
    """A connection between two launchers; `leads` says which end this is. Takes over `connection`.

    Raises NotTrusted if the other side's proof is wrong, and OSError if it closes the connection or takes longer than
    five seconds.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, leads: bool) -> None:
        self.host: str = connection.getpeername()[0]
        """Address of the other side."""
        self.lost = threading.Event()
        """Set when the other side closed the connection, or has been silent for too long."""
        self._messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        self._connection = connection
        self._sending = threading.Lock()
        try:
            connection.settimeout(_GREETING_SECONDS)
            _greet(connection, secret, leads=leads)
        except OSError:
            connection.close()
            raise
        connection.settimeout(SILENT_SECONDS)
        for work in (self._listen, self._beat):
            threading.Thread(target=work, daemon=True).start()

    def send(self, **message: Any) -> None:
        """Sends a message of plain JSON; a lost link drops it."""
        try:
            with self._sending:
                self._connection.sendall(json.dumps(message).encode() + b"\n")
        except OSError:
            self.lost.set()

    def next_message(self, seconds: float) -> dict[str, Any]:
        """The next message, or an empty one if none comes within this time or none can come any more."""
        with contextlib.suppress(queue.Empty):
            # What came before the link was lost still counts.
            return self._messages.get(timeout=0.0 if self.lost.is_set() else seconds)
        return {}

    def close(self) -> None:
        self.lost.set()
        # Wakes the thread that listens, as closing alone would not.
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._connection.close()

    def _listen(self) -> None:
        with contextlib.suppress(OSError, ValueError), self._connection.makefile("rb") as lines:
            while line := lines.readline(_MAX_LINE):
                if message := json.loads(line):
                    self._messages.put(message)
        self.lost.set()

    def _beat(self) -> None:
        while not self.lost.wait(_BEAT_SECONDS):
            self.send()


class Gathering:
    """Listens at `address`, at a free port, and nowhere else, for launchers that know `secret`.

    `hosts`: number of hosts of the trainer; the others are 1 to hosts − 1.
    """

    def __init__(self, address: str, secret: bytes, hosts: int) -> None:
        self.address = address
        self._secret = secret
        self._hosts = hosts
        self._listening = socket.create_server((address, 0))
        self.port: int = self._listening.getsockname()[1]
        self._links: dict[int, Link] = {}
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, name="gathering", daemon=True).start()

    def present(self) -> dict[int, Link]:
        """The hosts that are connected, by number."""
        with self._lock:
            return {host: link for host, link in sorted(self._links.items()) if not link.lost.is_set()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            # Wakes the thread that accepts.
            self._listening.shutdown(socket.SHUT_RDWR)
        self._listening.close()
        with self._lock:
            for link in self._links.values():
                link.close()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = self._listening.accept()
                # Each in its own thread, so that a silent connection blocks no other host.
                threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            link = Link(connection, self._secret, leads=True)
            host = link.next_message(_GREETING_SECONDS).get("join", -1)
            with self._lock:
                connected = {host: link.host for host, link in self._links.items() if not link.lost.is_set()}
                refused = refusal(host, link.host, {0: self.address, **connected}, self._hosts)
                if refused is None:
                    if (former := self._links.get(host)) is not None:
                        former.close()
                    self._links[host] = link
                    return
            link.send(refused=refused)
            link.close()


def refusal(host: object, address: str, others: Mapping[int, str], hosts: int) -> str | None:
    """Why `host` at `address` can't join `others`, which are addresses by number; None if it can."""
    if host not in range(1, hosts):
        return f"there is no host {host} among {hosts}"
    same = [number for number, other in others.items() if number != host and other == address]
    # On loopback all hosts are one machine, for trying things out.
    if same and not address.startswith(_LOOPBACK):
        return f"it is the machine of host {same[0]}, at {address}; expected one job per host: make host LIMIT=1"
    return None


def _greet(connection: socket.socket, secret: bytes, *, leads: bool) -> None:
    nonce = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(nonce)
    other = _receive(connection, _NONCE_BYTES)
    connection.sendall(_proof(secret, nonce, other, leads=leads))
    expected = _proof(secret, other, nonce, leads=not leads)
    if not hmac.compare_digest(_receive(connection, len(expected)), expected):
        raise NotTrusted("the other side does not know the secret of this run's trainer")


def _proof(secret: bytes, nonce: bytes, other: bytes, *, leads: bool) -> bytes:
    # With the role, so that an echo proves nothing.
    return hmac.digest(secret, (b"leader" if leads else b"member") + nonce + other, "sha256")


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        if not (chunk := connection.recv(nbytes - len(received))):
            raise ConnectionError("the other side closed the connection")
        received += chunk
    return received
