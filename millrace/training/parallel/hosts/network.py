"""What the launcher of each host is told, and this host's own address in the trainer's network."""

import fcntl
import json
import socket
import struct
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from ipaddress import IPv4Address, IPv4Network
from typing import Self

from millrace.errors import InputError

_SIOCGIFADDR = 0x8915
"""From Linux's netdevice(7): the IPv4 address of a network interface."""


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """The hosts of one trainer, as one of them sees it."""

    run_url: str
    """Where the run is stored; there the hosts find the leading one."""
    attempt: int
    host: int
    """This one, in [0, hosts); host 0 leads."""
    hosts: int
    min_hosts: int
    """With how many to go on while others are missing, in [1, hosts]."""
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


@dataclass(frozen=True)
class Interface:
    """A network interface of this host."""

    name: str
    """Such as eth0; gloo and NCCL are told where to listen by this name."""
    address: str


def own_interface(network: str) -> Interface:
    """This host's interface in `network`, such as 10.0.0.0/24. Raises InputError if it has none there."""
    found = {name: address for _, name in socket.if_nameindex() if (address := _address(name)) is not None}
    return choose(found, network)


def choose(found: Mapping[str, str], network: str) -> Interface:
    """The first of `found`, addresses by interface, that is in `network`. Raises InputError if none is."""
    within = IPv4Network(network)
    for name, address in found.items():
        if IPv4Address(address) in within:
            return Interface(name, address)
    raise InputError(
        f"placement.train.network is {network}, and host {socket.gethostname()} has no address in it, only "
        f"{', '.join(sorted(found.values())) or 'none at all'}; expected a network that every host of the trainer is in"
    )


def _address(interface: str) -> str | None:
    """The first IPv4 address of an interface, if it has one."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        try:
            answer = fcntl.ioctl(any_socket, _SIOCGIFADDR, struct.pack("256s", interface.encode()))
        except OSError:
            return None
    return socket.inet_ntoa(answer[20:24])
