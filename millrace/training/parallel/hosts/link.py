"""A connection between the launchers of two hosts that have proved to each other that they know the run's secret.

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
from typing import Any

_NONCE_BYTES = 32
_GREETING_SECONDS = 5.0
_BEAT_SECONDS = 2.0
SILENT_SECONDS = 20.0
"""A launcher that has sent nothing for so long counts as lost. Shorter cuts of the network are survived."""
_MAX_LINE = 1 << 16


class NotTrusted(ConnectionError):
    """The other side does not know the secret."""


class Link:
    """One such connection; `leads` says which end this is. Takes over `connection`.

    Raises NotTrusted if the other side's proof is wrong, and OSError if it closes the connection or takes longer than
    five seconds.
    """

    def __init__(self, connection: socket.socket, secret: bytes, *, leads: bool) -> None:
        self.host: str = connection.getpeername()[0]
        """Address of the other side."""
        self.lost = threading.Event()
        """Set when the other side closed the connection, or has been silent for too long."""
        self.messages: queue.SimpleQueue[dict[str, Any]] = queue.SimpleQueue()
        """What came and nobody has taken yet."""
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
            return self.messages.get(timeout=0.0 if self.lost.is_set() else seconds)
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
                    self.messages.put(message)
        self.lost.set()

    def _beat(self) -> None:
        while not self.lost.wait(_BEAT_SECONDS):
            self.send()


def _greet(connection: socket.socket, secret: bytes, *, leads: bool) -> None:
    own = secrets.token_bytes(_NONCE_BYTES)
    connection.sendall(own)
    other = _receive(connection, _NONCE_BYTES)
    connection.sendall(_proof(secret, own, other, leads=leads))
    expected = _proof(secret, other, own, leads=not leads)
    if not hmac.compare_digest(_receive(connection, len(expected)), expected):
        raise NotTrusted("the other side does not know the secret of this run's trainer")


def _proof(secret: bytes, own: bytes, other: bytes, *, leads: bool) -> bytes:
    # With the role, so that nobody proves anything by sending back what it got.
    return hmac.digest(secret, (b"leader" if leads else b"member") + own + other, "sha256")


def _receive(connection: socket.socket, nbytes: int) -> bytes:
    received = b""
    while len(received) < nbytes:
        if not (some := connection.recv(nbytes - len(received))):
            raise ConnectionError("the other side closed the connection")
        received += some
    return received
