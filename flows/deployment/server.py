"""A private Prefect server on loopback, for a campaign started without one. It ends with the campaign.

millrace run ──► is PREFECT_API_URL set? ──yes──► that server
                          │ no
                          └──► python -m flows.deployment.server PORT    starts while the controller makes its checks
                                                                         and imports what it needs
The private server runs in its own session, so that Ctrl-C does not reach it and a draining campaign can still report.
Its standard input is a lifeline: it closes when the controller ends for any reason, and then the server stops. If the
server ends first, it is started again on its port, with its database: Prefect's clients retry until it answers.
"""

import atexit
import contextlib
import gc
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from millrace.errors import InputError

_START_SECONDS = 90.0
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_POLL_SECONDS = 0.03
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_RESTARTS = 10
"""Most restarts of a server that ends again and again."""
_SETTINGS = {
    # Written in batches: with a transaction for each task run and event, SQLite is locked for too long.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
    # A campaign uses no blocks. Prefect must not note that they were registered either: a server with a UI that opens
    # the same database later registers them.
    "PREFECT_SERVER_REGISTER_BLOCKS_ON_START": "false",
    "PREFECT_SERVER_MEMOIZE_BLOCK_AUTO_REGISTRATION": "false",
}


@contextlib.contextmanager
def prefect_server() -> Iterator[Callable[[], None]]:
    """Starts a private server unless one is configured. Its value waits for it; from then on Prefect uses it.

    What comes before that call takes place while the server starts. A server that was never waited for ends with the
    block, others with this process. Enter it before anything else imports Prefect. Exit handlers run in reverse order,
    so Prefect's own then still reach the server before ours stops it. Raises InputError if the configured server does
    not answer, or if there is none and Prefect has no folder to write to.
    """
    atexit.register(_stop)
    # At once, because importing Prefect takes as long as a third of the server's start. If it turns out that a profile
    # names a server, this one ends again.
    unwritable = None if os.environ.get("PREFECT_API_URL") else _unwritable_home()
    started = None if os.environ.get("PREFECT_API_URL") or unwritable else _start()
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured: str | None = PREFECT_API_URL.value()
    if configured:
        _stop()
        _check_answers(configured)
        yield lambda: None
        return
    if unwritable:
        raise InputError(unwritable)
    server = started or _start()
    with contextlib.ExitStack() as unused, contextlib.ExitStack() as settings:
        unused.callback(_stop)

        def wait() -> None:
            server.await_start()
            unused.pop_all()
            settings.enter_context(temporary_settings(updates={PREFECT_API_URL: f"http://127.0.0.1:{server.port}/api"}))

        yield wait


class _PrivateServer:
    """A server of this process, on a free port."""

    def __init__(self) -> None:
        self.port = free_port()
        self._stopping = threading.Event()
        self._process = self._spawn()

    def await_start(self) -> None:
        """Waits until it answers; from then on it is started again if it ends. Raises RuntimeError if it never does."""
        _wait_until_healthy(self.port, self._process)
        threading.Thread(target=self._keep_alive, name="prefect server", daemon=True).start()

    def stop(self) -> None:
        """Ends it for good."""
        self._stopping.set()
        process = self._process
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
        process.kill()
        process.wait()

    def _spawn(self) -> subprocess.Popen[bytes]:
        own = {"PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"}
        return subprocess.Popen(
            [sys.executable, "-m", "flows.deployment.server", str(self.port)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,
            env={**os.environ, **own},
        )

    def _keep_alive(self) -> None:
        from prefect.logging import get_logger

        for _ in range(_RESTARTS):
            code = self._process.wait()
            if self._stopping.wait(_POLL_SECONDS):
                return
            how = f"exit code {code}" if code >= 0 else signal.Signals(-code).name
            get_logger(__name__).warning("the private Prefect server ended (%s) and is started again", how)
            self._process = self._spawn()
            if self._stopping.is_set():
                self.stop()


def _unwritable_home() -> str | None:
    """A sentence if Prefect can't write to its folder, where the private server's database is."""
    if any(os.environ.get(f"PREFECT_{part}_DATABASE_CONNECTION_URL") for part in ("SERVER", "API")):
        return None
    home = Path(os.environ.get("PREFECT_HOME") or "~/.prefect").expanduser()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return None
    except OSError as error:
        return (
            f"Prefect's folder {home} can't be written ({error.strerror}); expected a writable HOME, or PREFECT_HOME "
            "set to a writable folder"
        )


_private: list[_PrivateServer] = []


def _start() -> _PrivateServer:
    """A private server that is starting."""
    _private.append(_PrivateServer())
    return _private[-1]


def _stop() -> None:
    while _private:
        _private.pop().stop()


def _check_answers(url: str) -> None:
    """Raises InputError at once; Prefect itself would retry for minutes."""
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=_ANSWER_SECONDS)
    except (httpx.ConnectError, httpx.TimeoutException) as error:
        raise InputError(f"PREFECT_API_URL is {url}, but no Prefect server answers there: {error}") from error


def bypass_proxies() -> None:
    """Adds loopback to NO_PROXY, for this process and its children: no proxy reaches this machine's own servers."""
    known = os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or ""
    hosts = [host.strip() for host in known.split(",") if host.strip()]
    hosts += [host for host in _LOOPBACK if host not in hosts]
    # Both, because libraries differ in which of the two they prefer.
    os.environ["no_proxy"] = os.environ["NO_PROXY"] = ",".join(hosts)


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(port: int, process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the private Prefect server exited with code {process.returncode} while starting")
        if _is_healthy(port):
            return
        time.sleep(_POLL_SECONDS)
    raise RuntimeError(f"the private Prefect server was not healthy within {_START_SECONDS:.0f} s")


def _is_healthy(port: int) -> bool:
    # Not httpx: each of its clients loads all certificates, and this is asked often while both cores are busy.
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_ANSWER_SECONDS)
    with contextlib.closing(connection), contextlib.suppress(OSError, http.client.HTTPException):
        connection.request("GET", "/api/health")
        return connection.getresponse().status == http.HTTPStatus.OK
    return False


def _serve(port: int) -> None:
    # Nothing that is imported becomes garbage: looking for some takes an eighth of the time until the server listens.
    gc.disable()
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    threading.Thread(target=_watch, name="lifeline", daemon=True).start()
    import uvicorn
    from prefect.server.api.server import create_app
    from prefect.settings import PREFECT_API_DATABASE_CONNECTION_URL

    from flows.deployment.database import close_failed_cursors, copy_template, user_cache

    close_failed_cursors()
    copy_template(str(PREFECT_API_DATABASE_CONNECTION_URL.value()), user_cache())
    app = create_app()
    gc.freeze()
    gc.enable()
    uvicorn.run(app, host="127.0.0.1", port=port, log_level="error")


def _watch() -> None:
    while os.read(0, 1024):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
