"""Work that a page will need is done in advance.

start ─────────► slow imports
GET of a page ─► its runs are read while the browser loads scripts ─► `show` finds them in their readers
"""

import threading

import plotly.graph_objects as go
import pyarrow as pa
from flask import Flask, Response, request

from dashboard.pages.site import Site


def read_ahead(server: Flask, site: Site) -> None:
    """Starts reading the runs of each served page, one page at a time, so that many requests cost little."""
    _warm_up()
    reading = threading.Lock()

    def read(path: str, search: str) -> None:
        try:
            site.read(path, search)
        finally:
            reading.release()

    @server.after_request
    def begin(response: Response) -> Response:
        is_page = request.method == "GET" and response.status_code == 200 and response.mimetype == "text/html"
        if is_page and reading.acquire(blocking=False):
            search = request.query_string.decode("utf-8", "replace")
            threading.Thread(target=read, args=(request.path, search), daemon=True).start()
        return response


def _warm_up() -> None:
    # Arrow imports pandas at the first such call; meanwhile, Plotly can't write JSON in another thread.
    pa.chunked_array([[0.0]]).to_numpy()
    # Plotly imports its classes with the first figure.
    figure = go.Figure(data=[{"type": "scatter", "x": [0], "y": [0], "line": {"width": 1}}])
    figure.update_xaxes(title={"text": ""}).add_annotation(text="").to_json()
