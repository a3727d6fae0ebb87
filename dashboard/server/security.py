"""Access checks of the dashboard, and the security headers of its responses.

request ─► GET, HEAD, POST? ─► on loopback: does Host name this machine? ─► with a token: was it sent? ─► page
           └ no: 405           └ no: 403, another site's name              ├ ?token=: cookie, then reload
                                                                            └ no cookie, no Bearer: 401

A malicious web site can make its own name point to 127.0.0.1 (DNS rebinding), and could then read a page that needs no
token. The Host header still has the site's name.
"""

import hashlib
import hmac
import ipaddress
import os
from collections.abc import Sequence
from urllib.parse import urlsplit

from flask import Flask, Response, request

from millrace.errors import InputError

TOKEN_VARIABLE = "MILLRACE_DASHBOARD_TOKEN"
MIN_TOKEN_LENGTH = 16
MAX_BODY_BYTES = 64 * 1024
_METHODS = ("GET", "HEAD", "POST")


def is_loopback(host: str) -> bool:
    """Whether `host`, a name or an address without a port, is a loopback address."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host.lower() == "localhost"


def chosen_token(host: str, token: str | None) -> str | None:
    """Returns the required token: `token`, or from the environment, or None on loopback.

    Raises InputError if it is too short, or missing although `host` is reachable from other machines.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(host):
        raise InputError(
            f"{host}, which lets other machines read the dashboard",
            key="--host",
            expected=f"a token of at least {MIN_TOKEN_LENGTH} characters in {TOKEN_VARIABLE} or --token",
        )
    if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii()):
        raise InputError(
            f"{len(token)} characters long",
            key="the dashboard's token",
            expected=f"at least {MIN_TOKEN_LENGTH} ASCII characters",
        )
    return token


def guard(app: Flask, *, host: str, token: str | None, script_hashes: Sequence[str]) -> None:
    """Adds the checks and headers to every response of `app`, which listens on `host`.

    `script_hashes`: inline scripts that may run, as `'sha256-…'`.
    """
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    policy = _content_policy(script_hashes)

    @app.before_request
    def check() -> Response | None:
        if request.method not in _METHODS:
            return _refusal(405, "the dashboard is read-only")
        if is_loopback(host) and not is_loopback(_host_name()):
            return _refusal(403, "the dashboard is for this machine: open it as localhost or 127.0.0.1")
        return None if token is None else _check_token(token)

    @app.after_request
    def add_headers(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = policy
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["X-Frame-Options"] = "DENY"
        # The first address may contain the token.
        response.headers["Referrer-Policy"] = "no-referrer"
        response.headers.setdefault("Cache-Control", "no-store")
        return response


def _content_policy(script_hashes: Sequence[str]) -> str:
    """Returns a policy that allows content of this server, and inline content only for Dash and Plotly.

    Dash starts its renderer with an inline script, allowed by its hash. Plotly uses inline styles; its icons and saved
    images are data: and blob: URLs.
    """
    scripts = " ".join(("script-src 'self'", *script_hashes))
    return (
        f"default-src 'self'; {scripts}; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "object-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def _host_name() -> str:
    try:
        return urlsplit(f"//{request.headers.get('Host', '')}").hostname or ""
    except ValueError:
        return ""


def _check_token(token: str) -> Response | None:
    # Ports of a host share cookies, so two dashboards need two names, and no cookie contains the token itself.
    name = f"millrace-{request.environ['SERVER_PORT']}"
    value = hmac.digest(token.encode(), b"cookie", hashlib.sha256).hex()
    if request.method == "GET" and _same(request.args.get("token", ""), token):
        # A page, because a redirect after a link from another site would not send the strict cookie.
        response = Response(
            '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=?"><p><a href="?">Continue</a>',
            mimetype="text/html",
        )
        response.set_cookie(name, value, httponly=True, samesite="Strict", path="/")
        return response
    scheme, _, credentials = request.headers.get("Authorization", "").partition(" ")
    if _same(request.cookies.get(name, ""), value) or (
        scheme.lower() == "bearer" and _same(credentials.strip(), token)
    ):
        return None
    response = _refusal(401, "the dashboard needs its token: open it with ?token=…, or send Authorization: Bearer …")
    response.headers["WWW-Authenticate"] = "Bearer"
    return response


def _same(received: str, expected: str) -> bool:
    return hmac.compare_digest(received.encode("utf-8", "surrogateescape"), expected.encode())


def _refusal(status: int, sentence: str) -> Response:
    return Response(f"{sentence}\n", status=status, mimetype="text/plain")
