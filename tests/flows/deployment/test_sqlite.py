"""Failed statements of SQLite, with real connections of SQLAlchemy's, as Prefect servers have them."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

_FREEZE = """
import asyncio, gc, sqlite3, sys, time
from sqlalchemy import text
from sqlalchemy.exc import OperationalError
from sqlalchemy.ext.asyncio import create_async_engine

from flows.deployment.database import close_failed_cursors
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
# As if each server had come to the point where it serves.
_SERVERS = """
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


def _stands_still(*arguments: str) -> float:
    """Seconds for which the event loop frees what a failed statement left, while its connection waits for a lock."""
    ended = subprocess.run([sys.executable, "-c", _FREEZE, *arguments], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    return float(ended.stdout)


def test_the_event_loop_does_not_wait_for_a_connection_that_waits_for_a_lock(tmp_path: Path) -> None:
    assert _stands_still(str(tmp_path / "a.db")) < 0.5


@pytest.mark.slow
@pytest.mark.parametrize(
    "server",
    [
        pytest.param(["flows.deployment.server", "0"], id="private"),
        pytest.param(
            ["flows.deployment.shared_server", "--no-prompt", "server", "start"],
            id="make server",
            marks=pytest.mark.extended,
        ),
    ],
)
def test_both_servers_close_failed_cursors(tmp_path: Path, server: list[str]) -> None:
    # The private server ends when its standard input does.
    stdin, lifeline = os.pipe()
    ended = subprocess.run(
        [sys.executable, "-c", _SERVERS, *server],
        env={**os.environ, "PREFECT_HOME": str(tmp_path)},
        stdin=stdin,
        capture_output=True,
        text=True,
    )
    os.close(stdin)
    os.close(lifeline)
    assert "Cannot operate on a closed cursor." in ended.stdout, ended.stderr
