"""A host's network interfaces, and which of them is in a network."""

import fcntl
import socket
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

from millrace.errors import InputError

_SIOCGIFADDR = 0x8915
"""From Linux's netdevice(7): the IPv4 address of a network interface."""


@dataclass(frozen=True)
class Interface:
    """A network interface of this host."""

    name: str
    """Such as eth0; gloo and NCCL are told where to listen by this name."""
    address: str


def own_interface(network: str, key: str) -> Interface:
    """This host's interface in `network`, such as 10.0.0.0/24.

    Raises InputError, naming the setting `key`, if it has none there.
    """
    found = {name: address for _, name in socket.if_nameindex() if (address := _address(name)) is not None}
    return choose(found, network, key)


def choose(found: Mapping[str, str], network: str, key: str) -> Interface:
    """The first of `found`, addresses by interface, that is in `network`. Raises InputError as `own_interface` does."""
    within = IPv4Network(network)
    for name, address in found.items():
        if IPv4Address(address) in within:
            return Interface(name, address)
    raise InputError(
        f"{key} is {network}, and host {socket.gethostname()} has no address in it, only "
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
