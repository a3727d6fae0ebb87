"""Where the launchers of the other hosts come to that of host 0, and stay connected as long as they live."""

import contextlib
import socket
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from millrace.training.parallel.hosts.link import Link

_LOOPBACK = "127."
_JOIN_SECONDS = 5.0


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

    def late(self, members: Mapping[int, Link]) -> list[int]:
        """The hosts that are connected and are none of `members`."""
        return [host for host in self.present() if host not in members]

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
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
                # Each in its own thread: one that connects and says nothing keeps nobody waiting.
                threading.Thread(target=self._welcome, args=(connection,), daemon=True).start()

    def _welcome(self, connection: socket.socket) -> None:
        with contextlib.suppress(OSError):
            link = Link(connection, self._secret, leads=True)
            host = link.next_message(_JOIN_SECONDS).get("join", -1)
            with self._lock:
                refused = refusal(host, link.host, self._others(), self._hosts)
                if refused is None:
                    if (former := self._links.get(host)) is not None:
                        former.close()
                    self._links[host] = link
                    return
            link.send(refused=refused)
            link.close()

    def _others(self) -> dict[int, str]:
        """Addresses of this host and of those that are connected, by number."""
        return {0: self.address} | {host: link.host for host, link in self._links.items() if not link.lost.is_set()}


def refusal(host: object, address: str, others: Mapping[int, str], hosts: int) -> str | None:
    """Why `host` at `address` can't join `others`, which are addresses by number; None if it can."""
    if host not in range(1, hosts):
        return f"there is no host {host} among {hosts}"
    same = [number for number, other in others.items() if number != host and other == address]
    # On loopback all hosts are one machine, for trying things out.
    if same and not address.startswith(_LOOPBACK):
        return f"it is the machine of host {same[0]}, at {address}; expected one job per host: make host LIMIT=1"
    return None
