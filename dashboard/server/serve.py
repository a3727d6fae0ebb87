"""Serves the dashboard with waitress until Ctrl-C."""

import errno
import logging
import socket

import waitress

from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.server.security import MAX_BODY_BYTES, chosen_token
from millrace.errors import InputError

_CONNECTIONS = 500
"""Maximum number of connections, because clients may open idle ones."""
_IDLE_SECONDS = 15
"""Idle connections are closed after this time; a browser opens another."""
_THREADS = 8
"""A browser opens up to six connections at once."""
_MAX_HEADER_BYTES = 16 * 1024


def serve(url: str, *, host: str, port: int, token: str | None) -> None:
    """Serves the runs at `url` until Ctrl-C, and prints one line with its address; port 0 takes any free port.

    Raises InputError and StorageError before serving: for the URL, a missing or short token, an address of another
    machine, or a port in use.
    """
    token = chosen_token(host, token)
    runs = Runs(url)
    app = make_app(runs, host=host, token=token)
    listener = _listen(host, port)
    note = "" if token is None else " (requires its token)"
    # waitress warns about more requests than threads, which needs no action.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    print(f"The dashboard of {runs.url} is at {_address(host, listener)}{note}; Ctrl-C ends it.", flush=True)
    waitress.serve(
        app.server,
        sockets=[listener],
        threads=_THREADS,
        connection_limit=_CONNECTIONS,
        channel_timeout=_IDLE_SECONDS,
        cleanup_interval=_IDLE_SECONDS,
        # select() fails for file descriptors above 1023.
        asyncore_use_poll=True,
        max_request_body_size=MAX_BODY_BYTES,
        max_request_header_size=_MAX_HEADER_BYTES,
        ident=None,
        _quiet=True,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        # The first address of a name is enough, because browsers try all.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"{port}, which is in use on {host}", key="--port", expected="a free port") from error
        if error.errno == errno.EACCES:
            raise InputError(f"{port}, which needs privileges", key="--port", expected="1024 or above") from error
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise InputError(host, key="--host", expected="an address of this machine") from error
        raise


def _address(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
