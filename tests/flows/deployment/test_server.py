"""The private server of a campaign, as a real process."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest

_REFUSED = """
import psutil
from flows.deployment.server import prefect_server
from millrace.errors import InputError
try:
    with prefect_server():
        [server] = psutil.Process().children()
        raise InputError("a mistake found while the server starts")
except InputError:
    print(server.is_running())
"""
_KILLED = """
import time
from flows.deployment.server import prefect_server
with prefect_server():
    import psutil
    [server] = psutil.Process().children()
    print(server.pid, flush=True)
    time.sleep(600)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No Prefect server is configured, and no database exists."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**mine, "PREFECT_HOME": str(tmp_path / "prefect")}


def test_a_server_that_nobody_waited_for_ends_with_its_block(environment: dict[str, str]) -> None:
    ended = subprocess.run([sys.executable, "-c", _REFUSED], env=environment, stdout=subprocess.PIPE, text=True)
    assert (ended.returncode, ended.stdout) == (0, "False\n")


def test_a_starting_server_ends_when_its_controller_is_killed(environment: dict[str, str]) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED], env=environment, stdout=subprocess.PIPE, text=True
    ) as controller:
        assert controller.stdout is not None
        server = os.pidfd_open(int(controller.stdout.readline()))
        controller.kill()
    try:
        # Readable once the process has ended.
        assert select.select([server], [], [], 60)[0]
    finally:
        os.close(server)
