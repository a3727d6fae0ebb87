"""Access checks of the dashboard, and the security headers of its responses.

request ─► GET, HEAD, POST? ─► on loopback: does Host name this machine? ─► a token is set: is it here? ─► page
           └ no: 405           └ no: 403, it is another site's name         ├ ?token=: cookie, then anew
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
    """The token required when serving on `host`: `token`, or the environment's, or none on loopback.

    Raises InputError if it is too short, or if it is missing and other machines could read the page.
    """
    token = token or os.environ.get(TOKEN_VARIABLE) or None
    if token is None and not is_loopback(host):
        raise InputError(
            f"--host {host} lets other machines read the dashboard, so it needs a token of at least "
            f"{MIN_TOKEN_LENGTH} characters: set {TOKEN_VARIABLE} or give --token"
        )
    if token is not None and (len(token) < MIN_TOKEN_LENGTH or not token.isascii()):
        raise InputError(
            f"the dashboard's token has {len(token)} characters: "
            f"expected at least {MIN_TOKEN_LENGTH}, all of them ASCII"
        )
    return token


def guard(app: Flask, *, host: str, token: str | None, script_hashes: Sequence[str]) -> None:
    """Adds the checks and headers to every response of `app`.

    `host` is the address it listens on; `script_hashes` are the inline scripts that may run, as `'sha256-…'`.
    """
    app.config["MAX_CONTENT_LENGTH"] = MAX_BODY_BYTES
    policy = _content_policy(script_hashes)

    @app.before_request
    def check() -> Response | None:
        if request.method not in _METHODS:
            return _refusal(405, "the dashboard can only be read")
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
    """Allows everything from this server and nothing inline, except what Dash and Plotly need.

    Dash starts its renderer with an inline script, allowed by its hash. Plotly uses style elements and attributes; the
    icons of its buttons, and pictures that users save, are data: and blob: URLs.
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
    # Cookies are shared by all ports of a host, so two dashboards need two names, and no cookie holds the token itself.
    name = f"millrace-{request.environ['SERVER_PORT']}"
    value = hmac.digest(token.encode(), b"cookie", hashlib.sha256).hex()
    if request.method == "GET" and _same(request.args.get("token", ""), token):
        # A page and not a redirect: after a link from another site, the redirect would not carry the strict cookie.
        response = Response(
            '<!DOCTYPE html><meta http-equiv="refresh" content="0; url=?"><p><a href="?">Go on</a>',
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
