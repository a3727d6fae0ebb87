"""Answers invalid callback requests with status 400 and a sentence instead of an exception.

A page drawn by an older server may send such requests.
"""

import logging

from dash import Dash
from dash.exceptions import CallbackException
from flask import Response, request

CALLBACK_PATH = "/_dash-update-component"
_LOGGER = logging.getLogger(__name__)


def reject_invalid(app: Dash) -> None:
    """Rejects requests of the wrong form, or with values that make a callback fail, and logs the traceback."""

    # Raised by Dash and Python for unknown callbacks, missing values and values of the wrong type.
    @app.server.errorhandler(CallbackException)
    @app.server.errorhandler(LookupError)
    @app.server.errorhandler(TypeError)
    @app.server.errorhandler(ValueError)
    @app.server.errorhandler(AttributeError)
    @app.server.errorhandler(RecursionError)
    def refuse(error: Exception) -> Response:
        if request.path != CALLBACK_PATH:
            raise error
        _LOGGER.warning("a callback request could not be answered", exc_info=error)
        return Response("this page can't be updated; load it again\n", status=400, mimetype="text/plain")
