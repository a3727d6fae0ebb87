"""How a stage of several ranks ended, by the exit codes of its ranks."""

import os
import signal

import pytest

from millrace.runtime.launcher import prepare, stage_exit_code
from millrace.runtime.messages import DRAINED, FENCED, MISCOUNTED, USER_ERROR

SIGKILLED, TERMINATED, FAULT = -signal.SIGKILL, -signal.SIGTERM, 1


@pytest.mark.parametrize(
    ("codes", "expected"),
    [
        ({}, 0),
        ({0: DRAINED}, DRAINED),
        ({0: USER_ERROR, 1: TERMINATED}, USER_ERROR),
        ({0: FAULT, 1: SIGKILLED, 2: TERMINATED}, SIGKILLED),
        ({1: SIGKILLED, 0: DRAINED}, SIGKILLED),
        ({2: SIGKILLED, 0: MISCOUNTED}, MISCOUNTED),
        ({1: FAULT, 0: FENCED}, FENCED),
        ({0: FAULT, 1: USER_ERROR}, USER_ERROR),
        ({1: USER_ERROR, 0: FENCED}, FENCED),
        ({1: 3, 0: TERMINATED}, 3),
        ({1: TERMINATED}, TERMINATED),
    ],
)
def test_permanent_codes_come_before_signals_and_signals_before_errors(codes: dict[int, int], expected: int) -> None:
    assert stage_exit_code(codes) == expected


def test_ranks_use_the_interface_of_exactly_this_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "environ", {})
    prepare("eth1")
    # gloo compares whole names; NCCL, without an equals sign, their beginnings.
    assert (os.environ["GLOO_SOCKET_IFNAME"], os.environ["NCCL_SOCKET_IFNAME"]) == ("eth1", "=eth1")
