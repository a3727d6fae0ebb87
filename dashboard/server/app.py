"""The app: layout, the two callbacks of every page, and responses other than pages.

address ────► show ────► frame, body, and their sources in `shown`       a link, the back button, `again`
tick, 1 s ──► refresh ─► frame; after a change, every figure and text
                     └─► `again`, if a run has become readable ─► show

The tick is disabled during a refresh, because the next tick would cancel a slow one.

Work that a page will need is done in advance: slow imports at the start; a page's runs are read while the browser loads
scripts, so that `show` finds them in their readers.
"""

import logging
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import dash_mantine_components as dmc
import plotly.graph_objects as go
import pyarrow as pa
from dash import ALL, Dash, Input, Output, Patch, State, ctx, dcc, html, no_update
from dash.development.base_component import Component
from dash.exceptions import DependencyException, PreventUpdate
from flask import Flask, Response, request
from werkzeug.exceptions import HTTPException

from dashboard.integrations.prometheus import exposition
from dashboard.pages import evaluation, overview, rail
from dashboard.pages import trajectories as trajectories_page
from dashboard.pages.draw import CHART, TEXT, reason
from dashboard.pages.site import TRAJECTORIES, Site
from dashboard.read.runs import Runs
from dashboard.server.security import guard
from dashboard.server.transfer import compress, serve_plotly

_CALLBACK_PATH = "/_dash-update-component"
_TICK_MS = 1000
_ASSETS = Path(__file__).parents[1] / "assets"
_LOGGER = logging.getLogger(__name__)
_INDEX = """<!DOCTYPE html>
<html lang="en">
    <head>
        {%metas%}
        <title>{%title%}</title>
        {%favicon%}
        {%css%}
    </head>
    <body>
        <div id="connection" role="alert" hidden></div>
        {%app_entry%}
        {%config%}
        {%scripts%}
        {%renderer%}
    </body>
</html>
"""


def make_app(runs: Runs, *, host: str, token: str | None) -> Dash:
    """Creates the app with access checks for listening on `host`; serve its `server`."""
    app = Dash(
        "dashboard",
        server=Flask("dashboard", static_folder=None),
        assets_folder=str(_ASSETS),
        title="Millrace",
        index_string=_INDEX,
        update_title="",
        suppress_callback_exceptions=True,
        enable_mcp=False,
    )
    app.layout = dmc.MantineProvider(
        [
            dcc.Location(id="address", refresh="callback-nav"),
            dcc.Interval(id="tick", interval=_TICK_MS),
            dcc.Store(id="shown"),
            dcc.Store(id="again"),
            html.Header(id="frame"),
            html.Main(id="page"),
            html.Footer(_theme_switch(), id="theme-switch"),
        ],
        id="theme",
        theme={"fontFamily": "var(--family)", "fontFamilyMonospace": "ui-monospace, monospace"},
        defaultColorScheme="auto",
    )
    app.clientside_callback(
        "scheme => scheme === 'auto' ? null : scheme", Output("theme", "forceColorScheme"), Input("scheme", "value")
    )
    site = Site(runs)
    _add_callbacks(app, site)
    trajectories_page.register(app, runs)
    rail.register(app, runs)
    overview.register(app)
    evaluation.register(app)
    # Response hooks run in reverse order, so compression sees complete responses.
    compress(app.server)
    _add_responses(app.server, site, runs)
    _read_ahead(app.server, site)
    guard(app.server, host=host, token=token, script_hashes=app.csp_hashes())
    # After the guard, which checks access.
    serve_plotly(app.server)
    _reject_invalid(app.server)
    return app


def _theme_switch() -> Component:
    """Draws the choice of light, dark or the system's scheme, which the browser keeps."""
    choices = [{"value": name.lower(), "label": name} for name in ("Light", "Auto", "Dark")]
    return dmc.SegmentedControl(id="scheme", data=choices, value="auto", size="xs", persistence=True)


def _add_callbacks(app: Dash, site: Site) -> None:
    @app.callback(
        Output("frame", "children"),
        Output("page", "children"),
        Output("shown", "data"),
        Input("address", "pathname"),
        Input("address", "search"),
        Input("again", "data"),
        State("shown", "data"),
    )
    def show(path: str, search: str | None, again: int | None, shown: Mapping[str, Any] | None) -> tuple[Any, ...]:
        # The trajectories page writes its query to the address.
        if ctx.triggered_id == "address" and shown and shown["path"] == path and path.endswith(TRAJECTORIES.name):
            return no_update, no_update, no_update
        page = site.show(path, search or "")
        return page.frame, page.body, page.drawn_from

    @app.callback(
        Output("frame", "children", allow_duplicate=True),
        Output({"type": CHART, "block": ALL}, "figure"),
        Output({"type": TEXT, "block": ALL}, "children"),
        Output("shown", "data", allow_duplicate=True),
        Output("again", "data"),
        Input("tick", "n_intervals"),
        State("address", "pathname"),
        State("address", "search"),
        State("shown", "data"),
        running=[(Output("tick", "disabled"), True, False)],
        prevent_initial_call=True,
    )
    def refresh(tick: int, path: str, search: str | None, shown: Mapping[str, Any] | None) -> tuple[Any, ...]:
        # Before the page is drawn, there is nothing to update. A redraw would empty a field that is being typed into.
        if shown is None or shown["path"] != path:
            raise PreventUpdate
        charts, texts = ([output["id"]["block"] for output in outputs] for outputs in ctx.outputs_list[1:3])
        now = site.refresh(path, search or "", shown, charts, texts)
        # A patch: the user may have gone to another page in the meantime, and `shown` keeps that page's path.
        changes = Patch()
        changes.update(now.drawn_from)
        drawn_from = changes if now.drawn_from else no_update
        return now.frame, now.figures, now.texts, drawn_from, tick if now.again else no_update


def _add_responses(server: Flask, site: Site, runs: Runs) -> None:
    """Adds Prometheus metrics, and status 404 for pages and scripts that do not exist."""

    @server.get("/metrics")
    def metrics() -> Response:
        return Response(exposition(runs), content_type="text/plain; version=0.0.4; charset=utf-8")

    @server.errorhandler(DependencyException)
    def no_such_script(_: DependencyException) -> Response:
        return Response("the file does not exist\n", status=404, mimetype="text/plain")

    @server.after_request
    def status_of_page(response: Response) -> Response:
        # Dash answers every address with the same page, which finds its content in the browser.
        if request.endpoint in ("/", "/<path:path>") and response.status_code == 200:
            search = request.query_string.decode("utf-8", "replace")
            if site.is_not_found(request.path, search):
                response.status_code = 404
        return response


def _read_ahead(server: Flask, site: Site) -> None:
    """Starts reading the runs of each served page, one page at a time, so that many requests cost little."""
    # Arrow imports pandas at the first such call; meanwhile, Plotly can't write JSON in another thread.
    pa.chunked_array([[0.0]]).to_numpy()
    # Plotly imports its classes with the first figure.
    figure = go.Figure(data=[{"type": "scatter", "x": [0], "y": [0], "line": {"width": 1}}])
    figure.update_xaxes(title={"text": ""}).add_annotation(text="").to_json()
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


def _reject_invalid(server: Flask) -> None:
    """Answers a callback request that fails with status 400 and the reason in one line, which the page shows.

    A page drawn by an older server may send such requests.
    """

    # Requests of the wrong form raise errors of many types, as do faults of ours.
    @server.errorhandler(Exception)
    def refuse(error: Exception) -> Response | HTTPException:
        if isinstance(error, HTTPException):
            return error
        if request.path != _CALLBACK_PATH:
            raise error
        _LOGGER.warning("a callback request could not be answered", exc_info=error)
        return Response(f"{reason(error)}\n", status=400, mimetype="text/plain")
