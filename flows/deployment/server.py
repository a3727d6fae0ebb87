"""Prefect servers: a private one on loopback for a campaign that starts without one, and the one of `make server`.

millrace run ──► is PREFECT_API_URL set? ──yes──► that server
                          │ no
                          └──► python -m flows.deployment.server PORT    starts while the controller checks the config

The private server runs in its own session, so that Ctrl-C does not reach it and a draining campaign can still report.
Its standard input is a lifeline: it closes when the controller ends for any reason, and then the server stops.

A failed SQLite statement must not freeze either server:

    event loop's thread            connection's thread
    a statement ─────────────────► fails: "database is locked"; its cursor lives on in the error's traceback
    another statement ───────────► waits up to 60 s for a lock, and meanwhile holds the connection's mutex
    frees the old cursor: waits for that mutex, so the event loop and the holder of the lock stand still

Freeing a closed cursor needs no mutex. So a cursor closes itself, in the connection's thread, when its statement fails.
"""

import atexit
import contextlib
import os
import signal
import socket
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from millrace.errors import InputError
from millrace.runtime.messages import watch_lifeline

_START_SECONDS = 180.0
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.03
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SETTINGS = {
    # Task runs and events are written in batches, because a transaction for each locks SQLite for too long.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
}
"""Settings of both servers."""
_PRIVATE_SETTINGS = {
    # A campaign uses no blocks. Prefect must not record them as registered either: a server with a UI that opens the
    # same database later registers them.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


@contextlib.contextmanager
def prefect_server() -> Iterator[Callable[[], None]]:
    """Starts a private server unless one is configured; yields a function that waits for it and makes Prefect use it.

    A server that was never waited for ends with the block, others with this process. Enter the block before anything
    imports Prefect: exit handlers run in reverse order, so Prefect's own then still reach the server. Raises InputError
    if the configured server does not answer, or if there is none and Prefect's folder can't be written.
    """
    private = None
    if not os.environ.get("PREFECT_API_URL"):
        _check_home()
        # Started before Prefect is imported, which takes a third of the server's start. If a profile turns out to name
        # a server, this one ends again.
        private = _PrivateServer()
    try:
        from prefect.settings import PREFECT_API_URL, temporary_settings

        with contextlib.ExitStack() as settings:

            def wait() -> None:
                if private is not None:
                    private.wait_until_started()
                    settings.enter_context(temporary_settings(updates={PREFECT_API_URL: private.url}))

            if configured := PREFECT_API_URL.value():
                if private is not None:
                    private.stop()
                    private = None
                check_answers(configured)
            yield wait
    finally:
        if private is not None and not private.is_in_use:
            private.stop()


class _PrivateServer:
    def __init__(self) -> None:
        self._port = free_port()
        self.url = f"http://127.0.0.1:{self._port}/api"
        settings = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        self._process = subprocess.Popen(
            [sys.executable, "-m", "flows.deployment.server", str(self._port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **settings},
        )
        self.is_in_use = False
        atexit.register(self.stop)

    def wait_until_started(self) -> None:
        """Waits until it answers. Raises RuntimeError if it never does."""
        deadline = time.monotonic() + _START_SECONDS
        while self._process.poll() is None and time.monotonic() < deadline:
            # It listens once its database is migrated and its services run.
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self._port), _ANSWER_SECONDS):
                self.is_in_use = True
                return
            time.sleep(_POLL_SECONDS)
        code = self._process.returncode
        outcome = f"did not answer within {_START_SECONDS:.0f} s" if code is None else f"ended with exit code {code}"
        raise RuntimeError(f"the private Prefect server {outcome}")

    def stop(self) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(timeout=_STOP_SECONDS)
        self._process.kill()
        self._process.wait()


def _check_home() -> None:
    """Raises InputError if Prefect can't write to its folder, where the private server's database is."""
    if any(os.environ.get(f"PREFECT_{part}_DATABASE_CONNECTION_URL") for part in ("SERVER", "API")):
        return
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            pass
    except OSError as error:
        read = f"Prefect's folder can't be written ({error.strerror})"
        raise InputError(read, file=home, expected="a writable HOME, or PREFECT_HOME set to one") from error


def check_answers(url: str) -> None:
    """Raises InputError at once if no server answers at `url`; Prefect itself would retry for minutes."""
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=_ANSWER_SECONDS)
    except (httpx.TransportError, httpx.InvalidURL) as error:
        raise InputError(
            key="PREFECT_API_URL",
            read=f"{url}, but no Prefect server answers there ({error})",
            expected="the address of a running one, such as that of `make server`",
        ) from error


def bypass_proxies() -> None:
    """Adds loopback to NO_PROXY, for this process and its children: no proxy reaches this machine's own servers."""
    value = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in value.split(",") if host.strip()]
    # Both, because libraries differ in which of the two they prefer.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(dict.fromkeys([*hosts, *_LOOPBACK]))


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class _Cursor(sqlite3.Cursor):
    def execute(self, *arguments: Any) -> "_Cursor":
        return self._attempt(super().execute, *arguments)

    def executemany(self, *arguments: Any) -> "_Cursor":
        return self._attempt(super().executemany, *arguments)

    def _attempt(self, statement: Callable[..., Any], *arguments: Any) -> "_Cursor":
        try:
            statement(*arguments)
        except sqlite3.Error:
            self.close()
            raise
        return self


class _Connection(sqlite3.Connection):
    def cursor(self, factory: Any = _Cursor) -> Any:
        return super().cursor(factory)


def close_failed_cursors() -> None:
    """Makes the cursors of this process's new SQLite connections close themselves when they fail."""
    from sqlalchemy import Engine, event

    @event.listens_for(Engine, "do_connect")
    def choose_factory(dialect: Any, record: Any, arguments: list[Any], options: dict[str, Any]) -> None:
        if dialect.name == "sqlite":
            options.setdefault("factory", _Connection)


def _serve(port: int) -> None:
    """Runs the private server until its standard input closes."""
    watch_lifeline(lambda: os.kill(os.getpid(), signal.SIGTERM))
    import uvicorn
    from prefect.server.api.server import create_app

    uvicorn.run(create_app(), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    close_failed_cursors()
    is_private = sys.argv[1].isdecimal()
    for name, value in {**_SETTINGS, **(_PRIVATE_SETTINGS if is_private else {})}.items():
        os.environ.setdefault(name, value)
    if is_private:
        _serve(int(sys.argv[1]))
    else:
        # Prefect's own command, as `make server` runs it.
        from prefect.cli import app

        app()
