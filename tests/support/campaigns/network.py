"""Hosts on one machine: network namespaces with their own addresses, joined by a bridge.

    this machine, the bridge: 10.93.0.1 ──veth── 10.93.0.2, host-2
                                        └─veth── 10.93.0.3, host-3         a link can be cut and mended

A process in one has its own network and host name, but shares the machine's files and process ids.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil

_NETWORK = "10.93.0"
_BRIDGE = "millrace0"


class NoNetwork(Exception):
    """Network namespaces can't be made on this machine; the message says why."""


@dataclass(frozen=True)
class Host:
    """One network namespace."""

    number: int

    @property
    def name(self) -> str:
        return f"host-{self.number}"

    @property
    def address(self) -> str:
        return f"{_NETWORK}.{self.number}"

    def start(self, *command: str, hide: str | None = None, **options: object) -> subprocess.Popen[str]:
        """Starts a program on this host in its own session. It sees the folder `hide` as empty."""
        prepare = f"hostname {self.name}" + (f" && mount -t tmpfs none {hide}" if hide else "")
        inside = ["unshare", "--uts", "--mount", "sh", "-c", f'{prepare} && exec "$@"', "sh", *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *inside], text=True, start_new_session=True, **options
        )  # type: ignore[call-overload, no-any-return]

    def cut(self) -> None:
        """Cuts the link."""
        _ip("link", "set", f"mr-{self.number}", "down")

    def mend(self) -> None:
        """Restores the link."""
        _ip("link", "set", f"mr-{self.number}", "up")

    def kill_all(self) -> None:
        """Kills every process on the host, as a power failure would."""
        for pid in subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()


HERE = Host(1)
"""This machine as the other hosts see it."""


@contextmanager
def network(numbers: tuple[int, ...]) -> Iterator[list[Host]]:
    """Hosts of these numbers, which start at 2. Raises NoNetwork."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoNetwork("network namespaces need root, and iproute2")
    with ExitStack() as stack:
        try:
            _ip("link", "add", _BRIDGE, "type", "bridge")
            stack.callback(_ip, "link", "del", _BRIDGE)
            _ip("address", "add", f"{HERE.address}/24", "dev", _BRIDGE)
            _ip("link", "set", _BRIDGE, "up")
            hosts = [stack.enter_context(_host(number)) for number in numbers]
        except subprocess.CalledProcessError as error:
            raise NoNetwork(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield hosts


@contextmanager
def _host(number: int) -> Iterator[Host]:
    host = Host(number)
    _ip("netns", "add", host.name)
    try:
        _ip("link", "add", f"mr-{number}", "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", f"mr-{number}", "master", _BRIDGE, "up")
        for command in (
            ("address", "add", f"{host.address}/24", "dev", "eth0"),
            ("link", "set", "eth0", "up"),
            ("link", "set", "lo", "up"),
        ):
            _ip("-n", host.name, *command)
        yield host
    finally:
        host.kill_all()
        _ip("netns", "del", host.name)
        # The namespace keeps its end of the link until its last process has ended.
        with suppress(subprocess.CalledProcessError):
            _ip("link", "del", f"mr-{number}")


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
