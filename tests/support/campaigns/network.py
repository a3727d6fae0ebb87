"""Hosts on one machine: network namespaces with their own addresses, joined by a bridge.

    this machine, the bridge: 10.93.N.1 ──veth── 10.93.N.2, host-N-2
                                        └─veth── 10.93.N.3, host-N-3       a link can be cut and mended

A process in one has its own network and host name, but shares the machine's files and process ids. Each network of the
machine has its own N, so that several test sessions can run at once.
"""

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass

import psutil


class NoNetwork(Exception):
    """Network namespaces can't be made on this machine; the message says why."""


@dataclass(frozen=True)
class Host:
    """One network namespace; number 1 is this machine as the other hosts see it."""

    network: int
    number: int

    @property
    def name(self) -> str:
        return f"host-{self.network}-{self.number}"

    @property
    def address(self) -> str:
        return f"10.93.{self.network}.{self.number}"

    @property
    def link(self) -> str:
        """This machine's end of the host's link."""
        return f"mr-{self.network}-{self.number}"

    def start(self, *command: str, hide: str | None = None, **options: object) -> subprocess.Popen[str]:
        """Starts a program on this host in its own session. It sees the folder `hide` as empty."""
        prepare = f"hostname {self.name}" + (f" && mount -t tmpfs none {hide}" if hide else "")
        inside = ["unshare", "--uts", "--mount", "sh", "-c", f'{prepare} && exec "$@"', "sh", *command]
        return subprocess.Popen(
            ["ip", "netns", "exec", self.name, *inside], text=True, start_new_session=True, **options
        )  # type: ignore[call-overload, no-any-return]

    def cut(self) -> None:
        _ip("link", "set", self.link, "down")

    def mend(self) -> None:
        _ip("link", "set", self.link, "up")

    def kill_all(self) -> None:
        """Kills every process on the host, as a power failure would."""
        for pid in subprocess.run(["ip", "netns", "pids", self.name], capture_output=True, text=True).stdout.split():
            with suppress(psutil.NoSuchProcess):
                psutil.Process(int(pid)).kill()


@contextmanager
def network(num_hosts: int) -> Iterator[list[Host]]:
    """This machine, and `num_hosts` more. Raises NoNetwork."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        raise NoNetwork("network namespaces need root, and iproute2")
    with ExitStack() as stack:
        try:
            number = _add_bridge()
            bridge = _bridge(number)
            stack.callback(_ip, "link", "del", bridge)
            here = Host(number, 1)
            _ip("address", "add", f"{here.address}/24", "dev", bridge)
            _ip("link", "set", bridge, "up")
            hosts = [here, *(stack.enter_context(_host(number, 2 + i)) for i in range(num_hosts))]
        except subprocess.CalledProcessError as error:
            raise NoNetwork(f"{' '.join(error.cmd)}: {error.stderr.strip()}") from error
        yield hosts


def _bridge(network: int) -> str:
    return f"millrace{network}"


def _add_bridge() -> int:
    """Adds the bridge of the first network that no other session has, and returns the network's number."""
    for number in range(256):
        try:
            _ip("link", "add", _bridge(number), "type", "bridge")
        except subprocess.CalledProcessError as error:
            if "File exists" not in error.stderr:
                raise
        else:
            return number
    raise NoNetwork("all 256 networks are taken; `ip link` lists their bridges, millrace0 to millrace255")


@contextmanager
def _host(network: int, number: int) -> Iterator[Host]:
    host = Host(network, number)
    _ip("netns", "add", host.name)
    try:
        _ip("link", "add", host.link, "type", "veth", "peer", "name", "eth0", "netns", host.name)
        _ip("link", "set", host.link, "master", _bridge(network), "up")
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
            _ip("link", "del", host.link)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)
