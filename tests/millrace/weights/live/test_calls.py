"""A generator's end of the calls: which trainers it joins."""

from contextlib import closing
from typing import Any

import pytest
from support.weights.direct import PATIENT

from millrace.errors import WeightsNotReceived
from millrace.weights.base import Manifest, WeightsId
from millrace.weights.direct.layout import ShardLayout
from millrace.weights.direct.rendezvous import PushRendezvous, RendezvousClient
from millrace.weights.live.calls import INIT, LiveTransfer

NAME = "generator/0"


def first_call(environment: dict[str, str]) -> tuple[str, Any]:
    """The first call to a generator by a trainer with these variables."""
    with closing(PushRendezvous("127.0.0.1")) as rendezvous:
        manifest = Manifest(id=WeightsId(incarnation=0, policy_version=1, t_offered=1.0))
        push = rendezvous.announce(manifest, ShardLayout((), data=1), [NAME], "nccl")
        rendezvous.go(push, {NAME: "a session"})
        client = RendezvousClient(rendezvous.address, NAME, PATIENT)
        transfer = LiveTransfer(client, push, NAME, "a session", patience=PATIENT, seconds=PATIENT)
        assert transfer.join()
        client.set(push, "call/0", [INIT, {"backend": "nccl", "info": {}, "environment": environment}])
        return next(transfer.calls())


@pytest.mark.parametrize(
    ("trainer", "generator", "joins"),
    [
        ({}, {}, True),
        ({"NCCL_NET": "Socket"}, {"NCCL_NET": "Socket"}, True),
        ({"NCCL_NET": "Socket"}, {}, False),
        ({}, {"NCCL_IB_DISABLE": "1"}, False),
        ({"NCCL_NVLS_ENABLE": "0"}, {"NCCL_NVLS_ENABLE": "1"}, False),
        ({"NCCL_SOCKET_IFNAME": "lo"}, {"NCCL_SOCKET_IFNAME": "=lo"}, True),
        ({"NCCL_SOCKET_IFNAME": "lo"}, {"NCCL_SOCKET_IFNAME": "=eth0"}, False),
        ({}, {"NCCL_SOCKET_IFNAME": "=eth0"}, True),
    ],
)
def test_a_generator_joins_only_a_trainer_with_the_same_settings_of_nccl(
    trainer: dict[str, str], generator: dict[str, str], joins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in generator.items():
        monkeypatch.setenv(name, value)
    if joins:
        assert first_call(trainer)[0] == INIT
    else:
        with pytest.raises(WeightsNotReceived, match="NCCL"):
            first_call(trainer)
