"""What responses weigh on the wire: compressed, and kept by the browser where they cannot change.

scripts and styles ─► compressed once, kept here ─► the browser keeps those whose address holds a fingerprint, and
                                                    asks for the others with their ETag: 304, without a body
pages, callbacks   ─► compressed each time, never kept
"""

import gzip
import hashlib

from flask import Flask, Response, request

_STATIC = ("/_dash-component-suites/", "/assets/")
_LEAST_BYTES = 1400
"""A smaller response fits one packet as it is."""
_STATIC_LEVEL, _LEVEL = 9, 4
_KINDS = ("text/", "application/json", "application/javascript")
_PLOTLY = "/_dash-component-suites/plotly/package_data/plotly.min.js"


def compress(app: Flask) -> None:
    """Adds compression and caching to the responses of `app`."""
    packed: dict[bytes, bytes] = {}

    def packed_once(body: bytes) -> bytes:
        key = hashlib.sha256(body).digest()
        if key not in packed:
            packed[key] = gzip.compress(body, _STATIC_LEVEL, mtime=0)
        return packed[key]

    @app.after_request
    def pack(response: Response) -> Response:
        is_static = request.path.startswith(_STATIC)
        if is_static and response.status_code in (200, 304):
            _keep_in_browser(response)
        if response.status_code != 200 or not _is_text(response):
            return response
        response.vary.add("Accept-Encoding")
        if not request.accept_encodings.quality("gzip"):
            return response
        # Flask streams a file past us unless it is told not to.
        response.direct_passthrough = False
        body = response.get_data()
        if len(body) >= _LEAST_BYTES:
            response.set_data(packed_once(body) if is_static else gzip.compress(body, _LEVEL, mtime=0))
            response.content_encoding = "gzip"
        return response


def preload(app: Flask) -> None:
    """Lets the browser load Plotly at once on pages with charts: otherwise it waits for Dash to draw the first one."""

    @app.after_request
    def add_link(response: Response) -> Response:
        is_page = response.status_code == 200 and response.mimetype == "text/html"
        if is_page and request.path.startswith(("/run/", "/compare")) and not request.path.endswith("/trajectories"):
            response.headers["Link"] = f"<{_PLOTLY}>; rel=preload; as=script"
        return response


def _is_text(response: Response) -> bool:
    return "Content-Encoding" not in response.headers and (response.mimetype or "").startswith(_KINDS)


def _keep_in_browser(response: Response) -> None:
    """Fingerprinted files for a year; any other is asked for again with its ETag."""
    kept = f"max-age={response.cache_control.max_age}, immutable" if response.cache_control.max_age else "no-cache"
    # Not in a cache that people share: a token may guard it.
    response.headers["Cache-Control"] = f"private, {kept}"
