"""The private server of a campaign, as a real process."""

import os
import select
import subprocess
import sys
from pathlib import Path
from urllib.request import proxy_bypass

import pytest

from flows.deployment.server import bypass_proxies

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
_KILLED_ONCE = """
import http.client, os, select, time
from flows.deployment.server import prefect_server
with prefect_server() as wait:
    import psutil
    from prefect.settings import PREFECT_API_URL
    wait()
    [server] = psutil.Process().children()
    ended = os.pidfd_open(server.pid)
    server.kill()
    # Not server.wait(): it could take the exit code from the thread that waits for it.
    select.select([ended], [], [])
    address = PREFECT_API_URL.value().split("/")[2]
    while True:
        try:
            connection = http.client.HTTPConnection(address)
            connection.request("GET", "/api/health")
            print(connection.getresponse().status)
            break
        except ConnectionRefusedError:
            time.sleep(0.05)
    [server] = psutil.Process().children()
    print(server.pid)
"""
_KILLED_DURING_A_FLOW = """
from flows.deployment.server import prefect_server
with prefect_server() as wait:
    import psutil
    wait()
    from prefect import flow
    from prefect.client.orchestration import get_client
    @flow
    def one():
        [server] = psutil.Process().children()
        server.kill()
        return "done"
    print(one())
    with get_client(sync_client=True) as client:
        [run] = client.read_flow_runs()
        print(run.state.type.value)
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """No Prefect server is configured, and no database exists."""
    mine = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**mine, "PREFECT_HOME": str(tmp_path / "prefect")}


@pytest.mark.parametrize("known", ["", "example.org", "127.0.0.1, example.org"])
def test_loopback_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch, known: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", known)
    monkeypatch.setenv("no_proxy", "")
    bypass_proxies()
    assert all(proxy_bypass(host) for host in ("127.0.0.1", "localhost", "::1"))
    assert bool(proxy_bypass("example.org")) == ("example.org" in known)


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


@pytest.mark.slow
def test_a_server_that_is_killed_is_started_again_where_it_was(environment: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED_ONCE], env=environment, capture_output=True, text=True, timeout=200
    )
    assert ended.returncode == 0, ended.stderr
    status, server = ended.stdout.split()
    assert status == "200"
    assert "the private Prefect server ended (SIGKILL) and is started again" in ended.stderr
    assert not Path(f"/proc/{server}").exists(), "it ends with its controller"


_NO_HOME = """
from flows.deployment.server import prefect_server
from millrace.errors import InputError
try:
    with prefect_server():
        print("started")
except InputError as error:
    print(error)
"""


@pytest.mark.parametrize("named", ["HOME", "PREFECT_HOME"])
def test_a_folder_that_prefect_can_not_write_to_is_refused_in_one_sentence(
    environment: dict[str, str], tmp_path: Path, named: str
) -> None:
    (tmp_path / "a-file").touch()
    without = {name: value for name, value in environment.items() if name != "PREFECT_HOME"}
    ended = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", _NO_HOME],
        env={**without, named: str(tmp_path / "a-file")},
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"Prefect's folder {tmp_path}/a-file")
    assert ended.stdout.endswith("expected a writable HOME, or PREFECT_HOME set to a writable folder\n")


@pytest.mark.extended
def test_a_flow_whose_server_is_killed_ends_as_if_nothing_had_been(environment: dict[str, str]) -> None:
    ended = subprocess.run(
        [sys.executable, "-c", _KILLED_DURING_A_FLOW], env=environment, capture_output=True, text=True, timeout=200
    )
    assert (ended.returncode, ended.stdout.split()) == (0, ["done", "COMPLETED"]), ended.stderr
