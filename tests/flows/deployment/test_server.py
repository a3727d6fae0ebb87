"""The Prefect servers of campaigns, as real processes."""

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
        raise InputError("a user error while the server starts")
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
_NO_HOME = """
from flows.deployment.server import prefect_server
from millrace.errors import InputError
try:
    with prefect_server():
        print("started")
except InputError as error:
    print(error.file)
"""
_FREEZE = """
import asyncio, gc, sqlite3, sys, time
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from flows.deployment.server import close_failed_cursors
close_failed_cursors()

async def insert(connection):
    try:
        await connection.execute(text("INSERT INTO t VALUES (1)"))
    except OperationalError as error:
        return error

async def freeze():
    other = sqlite3.connect(sys.argv[1], isolation_level=None)
    other.execute("CREATE TABLE t (a)")
    engine = create_async_engine("sqlite+aiosqlite:///" + sys.argv[1], connect_args={"timeout": 0.0})
    async with engine.connect() as connection:
        other.execute("BEGIN IMMEDIATE")
        error = await insert(connection)
        assert "database is locked" in str(error)
        await connection.execute(text("PRAGMA busy_timeout = 2000"))
        waiting = asyncio.create_task(insert(connection))
        await asyncio.sleep(0.5)
        before = time.monotonic()
        del error
        gc.collect()
        print(time.monotonic() - before)
        other.execute("ROLLBACK")
        await waiting
    await engine.dispose()

asyncio.run(freeze())
"""
# Runs a server's module up to the point where it would serve.
_UNTIL_SERVING = """
import runpy, sqlite3, sys, uvicorn
from sqlalchemy import create_engine

def run(*arguments, **options):
    cursor = create_engine("sqlite://").raw_connection().driver_connection.cursor()
    try:
        cursor.execute("SELECT 1 FROM nowhere")
    except sqlite3.OperationalError:
        pass
    try:
        cursor.execute("SELECT 1")
    except sqlite3.ProgrammingError as error:
        print(error)

uvicorn.run = run
del sys.argv[0]
runpy.run_module(sys.argv[0], run_name="__main__")
"""


@pytest.fixture
def environment(tmp_path: Path) -> dict[str, str]:
    """The environment without a configured Prefect server and without its database."""
    variables = {name: value for name, value in os.environ.items() if not name.startswith("PREFECT_")}
    return {**variables, "PREFECT_HOME": str(tmp_path / "prefect")}


def run(program: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-c", program]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200)
    assert result.returncode == 0, result.stderr
    return result


@pytest.mark.parametrize("no_proxy", ["", "example.org", "127.0.0.1, example.org"])
def test_loopback_is_reached_without_a_proxy(monkeypatch: pytest.MonkeyPatch, no_proxy: str) -> None:
    monkeypatch.setenv("HTTP_PROXY", "http://127.0.0.1:9")
    monkeypatch.setenv("NO_PROXY", no_proxy)
    monkeypatch.setenv("no_proxy", "")
    bypass_proxies()
    assert all(proxy_bypass(host) for host in ("127.0.0.1", "localhost", "::1"))
    assert bool(proxy_bypass("example.org")) == ("example.org" in no_proxy)


def test_a_server_that_was_not_waited_for_ends_with_its_block(environment: dict[str, str]) -> None:
    assert run(_REFUSED, environment).stdout == "False\n"


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


@pytest.mark.parametrize("variable", ["HOME", "PREFECT_HOME"])
def test_an_unwritable_prefect_folder_is_a_user_error(
    environment: dict[str, str], tmp_path: Path, variable: str
) -> None:
    (tmp_path / "a-file").touch()
    without_home = {name: value for name, value in environment.items() if name != "PREFECT_HOME"}
    folder = run(_NO_HOME, {**without_home, variable: str(tmp_path / "a-file")}).stdout
    assert folder.startswith(f"{tmp_path}/a-file")


def test_the_event_loop_does_not_wait_for_a_locked_connection(tmp_path: Path) -> None:
    command = [sys.executable, "-c", _FREEZE, str(tmp_path / "a.db")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert float(result.stdout) < 1.0, "the connection waits for two seconds"


@pytest.mark.slow
@pytest.mark.parametrize(
    "arguments",
    [
        pytest.param(["0"], id="private"),
        pytest.param(["--no-prompt", "server", "start"], id="make server", marks=pytest.mark.extended),
    ],
)
def test_both_servers_close_failed_cursors(tmp_path: Path, arguments: list[str]) -> None:
    # The private server ends when its standard input does.
    stdin, lifeline = os.pipe()
    result = subprocess.run(
        [sys.executable, "-c", _UNTIL_SERVING, "flows.deployment.server", *arguments],
        env={**os.environ, "PREFECT_HOME": str(tmp_path)},
        stdin=stdin,
        capture_output=True,
        text=True,
    )
    os.close(stdin)
    os.close(lifeline)
    assert "Cannot operate on a closed cursor." in result.stdout, result.stderr
