"""Compression of responses, and caching of static files in the browser.

scripts and styles ─► compressed once, cached here ─► the browser caches files with a fingerprint in the address, and
                                                      revalidates others by ETag: 304, without a body
pages, callbacks   ─► compressed each time, never cached
"""

import gzip
import hashlib

from flask import Flask, Response, request, send_file

from dashboard.views.figures import PLOTLY_FILE

_STATIC = ("/_dash-component-suites/", "/assets/")
_LEAST_BYTES = 1400
"""Smaller responses fit into one packet uncompressed."""
_STATIC_LEVEL, _LEVEL = 6, 4
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
        # Flask streams files directly by default, without response hooks.
        response.direct_passthrough = False
        body = response.get_data()
        if len(body) >= _LEAST_BYTES:
            response.set_data(packed_once(body) if is_static else gzip.compress(body, _LEVEL, mtime=0))
            response.content_encoding = "gzip"
        return response


def serve_plotly(app: Flask) -> None:
    """Serves the small Plotly; on pages with charts the browser loads it before Dash draws the first chart."""

    @app.before_request
    def small() -> Response | None:
        return send_file(PLOTLY_FILE, max_age=None) if request.path == _PLOTLY else None

    @app.after_request
    def add_link(response: Response) -> Response:
        is_page = response.status_code == 200 and response.mimetype == "text/html"
        if is_page and request.path.startswith(("/run/", "/compare")) and not request.path.endswith("/trajectories"):
            response.headers["Link"] = f"<{_PLOTLY}>; rel=preload; as=script"
        return response


def _is_text(response: Response) -> bool:
    return "Content-Encoding" not in response.headers and (response.mimetype or "").startswith(_KINDS)


def _keep_in_browser(response: Response) -> None:
    """Caches fingerprinted files for a year; other files are revalidated by ETag."""
    kept = f"max-age={response.cache_control.max_age}, immutable" if response.cache_control.max_age else "no-cache"
    # Not in shared caches, because a token may protect it.
    response.headers["Cache-Control"] = f"private, {kept}"
