"""How a stage of several ranks ended, by the exit codes of its ranks."""

import signal

import pytest

from millrace.errors import DRAINED, FENCED, MISCOUNTED, USER_ERROR
from millrace.runtime.launcher import stage_exit_code

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
