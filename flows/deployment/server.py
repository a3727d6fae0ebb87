"""A private Prefect server on loopback, for a campaign started without one. It ends with the campaign.

millrace run ──► is PREFECT_API_URL set? ──yes──► that server
                          │ no
                          └──► python -m flows.deployment.server PORT

The private server runs in its own session, so that Ctrl-C does not reach it and a draining campaign can still report.
Its standard input is a lifeline: it closes when the controller ends for any reason, and then the server stops.
"""

import atexit
import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator

from millrace.errors import InputError

_START_SECONDS = 90.0
_STOP_SECONDS = 10.0
_ANSWER_SECONDS = 10.0
_SETTINGS = {
    # Written in batches: with a transaction for each task run and event, SQLite is locked for too long.
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_BATCH_SIZE": "100",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_READ_BATCH_SIZE": "50",
    "PREFECT_SERVER_SERVICES_TASK_RUN_RECORDER_FLUSH_INTERVAL": "1",
    "PREFECT_SERVER_SERVICES_EVENT_PERSISTER_READ_BATCH_SIZE": "50",
}


@contextlib.contextmanager
def prefect_server() -> Iterator[None]:
    """Within it, Prefect uses the configured server or, if there is none, a private one.

    Enter it before anything else imports Prefect. Exit handlers run in reverse order, so Prefect's own then still reach
    the server before ours stops it. Raises InputError if the configured server does not answer.
    """
    atexit.register(_stop)
    from prefect.settings import PREFECT_API_URL, temporary_settings

    configured: str | None = PREFECT_API_URL.value()
    if configured:
        _check_answers(configured)
        yield
        return
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.deployment.server", str(port)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,
        env={**os.environ, "PREFECT_UI_ENABLED": "0", "PREFECT__SERVER_EPHEMERAL": "1", "PREFECT__SERVER_FINAL": "1"},
    )
    _private.append(process)
    url = f"http://127.0.0.1:{port}/api"
    _wait_until_healthy(url, process)
    with temporary_settings(updates={PREFECT_API_URL: url}):
        yield


_private: list[subprocess.Popen[bytes]] = []


def _stop() -> None:
    while _private:
        process = _private.pop()
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_STOP_SECONDS)
        process.kill()
        process.wait()


def _check_answers(url: str) -> None:
    """Raises InputError at once; Prefect itself would retry for minutes."""
    import httpx

    try:
        httpx.get(f"{url}/health", timeout=_ANSWER_SECONDS)
    except (httpx.ConnectError, httpx.TimeoutException) as error:
        raise InputError(f"PREFECT_API_URL is {url}, but no Prefect server answers there: {error}") from error


def free_port() -> int:
    """A free TCP port on loopback."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def _wait_until_healthy(url: str, process: subprocess.Popen[bytes]) -> None:
    import httpx

    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(f"the private Prefect server exited with code {process.returncode} while starting")
        with contextlib.suppress(httpx.TransportError):
            if httpx.get(f"{url}/health", timeout=5).status_code == httpx.codes.OK:
                return
        time.sleep(0.1)
    raise RuntimeError(f"the private Prefect server was not healthy within {_START_SECONDS:.0f} s")


def _serve(port: int) -> None:
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)
    import uvicorn
    from prefect.server.api.server import create_app

    def watch() -> None:
        while os.read(0, 1024):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()
    uvicorn.run(create_app(), host="127.0.0.1", port=port, log_level="error")


if __name__ == "__main__":
    _serve(int(sys.argv[1]))
