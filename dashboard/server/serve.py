"""Serves the dashboard until Ctrl-C, with waitress: a WSGI server without debugger and reloader."""

import errno
import logging
import socket

import waitress

from dashboard.read.runs import Runs
from dashboard.server.app import make_app
from dashboard.server.security import MAX_BODY_BYTES, chosen_token
from dashboard.views.registry import VIEWS
from millrace.errors import InputError

_CONNECTIONS = 500
"""Most connections at once. Anyone who reaches the port may open some and say nothing."""
_IDLE_SECONDS = 15
"""A connection that says nothing is closed after this long; a browser opens another."""
_THREADS = 8
"""A browser opens up to six connections at once."""
_MAX_HEADER_BYTES = 16 * 1024


def serve(url: str, *, host: str, port: int, token: str | None) -> None:
    """Serves the runs at `url` until Ctrl-C, and prints one line with its address; port 0 takes any free port.

    Raises InputError and StorageError before serving: for the URL, a missing or short token, a host that is not this
    machine's, a port in use.
    """
    token = chosen_token(host, token)
    runs = Runs(url)
    app = make_app(runs, VIEWS, host=host, token=token)
    listener = _listen(host, port)
    note = "" if token is None else " (asks for its token)"
    # It warns whenever there are more requests than threads, which needs no action.
    logging.getLogger("waitress.queue").setLevel(logging.ERROR)
    print(f"The dashboard of {runs.url} is at {_address(host, listener)}{note}; Ctrl-C ends it.", flush=True)
    waitress.serve(
        app.server,
        sockets=[listener],
        threads=_THREADS,
        connection_limit=_CONNECTIONS,
        channel_timeout=_IDLE_SECONDS,
        cleanup_interval=_IDLE_SECONDS,
        # select() takes no file descriptor above 1023.
        asyncore_use_poll=True,
        max_request_body_size=MAX_BODY_BYTES,
        max_request_header_size=_MAX_HEADER_BYTES,
        ident=None,
        _quiet=True,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        # The first address of a name is enough: a browser tries all of them.
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise InputError(f"port {port} of {host} is taken: choose another with --port") from error
        if error.errno == errno.EACCES:
            raise InputError(f"port {port} is not yours to use: choose one from 1024 on with --port") from error
        if isinstance(error, socket.gaierror) or error.errno == errno.EADDRNOTAVAIL:
            raise InputError(f"--host {host}: not an address of this machine") from error
        raise


def _address(host: str, listener: socket.socket) -> str:
    port = listener.getsockname()[1]
    return f"http://[{host}]:{port}/" if ":" in host else f"http://{host}:{port}/"
