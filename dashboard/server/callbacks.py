"""Answers a callback request that fails with status 400 and the reason in one line, which the page shows.

A page drawn by an older server may send such requests.
"""

import logging

from dash import Dash
from flask import Response, request
from werkzeug.exceptions import HTTPException

from dashboard.pages.draw import reason

CALLBACK_PATH = "/_dash-update-component"
_LOGGER = logging.getLogger(__name__)


def reject_invalid(app: Dash) -> None:
    """Answers requests that make a callback fail, and logs the traceback."""

    # Requests of the wrong form raise errors of many types, as do faults of ours.
    @app.server.errorhandler(Exception)
    def refuse(error: Exception) -> Response | HTTPException:
        if isinstance(error, HTTPException):
            return error
        if request.path != CALLBACK_PATH:
            raise error
        _LOGGER.warning("a callback request could not be answered", exc_info=error)
        return Response(f"{reason(error)}\n", status=400, mimetype="text/plain")
