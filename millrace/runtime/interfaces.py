"""A host's network interfaces, and which of them is in a network."""

import socket
from collections.abc import Mapping
from dataclasses import dataclass
from ipaddress import IPv4Address, IPv4Network

import psutil

from millrace.errors import InputError


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
    addresses = {
        name: address.address
        for name, of_interface in psutil.net_if_addrs().items()
        for address in reversed(of_interface)
        if address.family == socket.AF_INET
    }
    return choose(addresses, network, key)


def choose(addresses: Mapping[str, str], network: str, key: str) -> Interface:
    """The first of the `addresses`, by interface, that is in `network`. Raises InputError as `own_interface` does."""
    within = IPv4Network(network)
    for name, address in addresses.items():
        if IPv4Address(address) in within:
            return Interface(name, address)
    raise InputError(
        f"{key} is {network}, and host {socket.gethostname()} has no address in it, only "
        f"{', '.join(sorted(addresses.values())) or 'none'}; expected a network that every host of the trainer is in"
    )
