"""Which of a host's addresses is in a network."""

import pytest

from millrace.errors import InputError
from millrace.runtime.interfaces import Interface, choose, own_interface


def test_a_host_finds_its_own_address_in_a_network() -> None:
    assert own_interface("127.0.0.0/8", "placement.train.network") == Interface("lo", "127.0.0.1")
    found = {"lo": "127.0.0.1", "eth0": "192.168.1.7", "ib0": "10.0.0.7"}
    assert choose(found, "10.0.0.0/24", "placement.train.network") == Interface("ib0", "10.0.0.7")
    with pytest.raises(InputError):
        choose(found, "10.9.0.0/24", "placement.train.network")
