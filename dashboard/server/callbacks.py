"""Rejects invalid callback requests with status 400 and a sentence instead of an exception."""

import logging
from collections.abc import Collection, Mapping
from typing import Any

from dash import Dash
from dash.exceptions import CallbackException
from flask import Response, abort, request

CALLBACK_PATH = "/_dash-update-component"
_TEXTS = ("pathname", "search")
_LOGGER = logging.getLogger(__name__)


def reject_malformed(app: Dash) -> None:
    """Rejects callback requests of the wrong form."""

    @app.server.before_request
    def check() -> None:
        if request.path != CALLBACK_PATH or request.method != "POST":
            return
        try:
            body = request.get_json(silent=True)
        except RecursionError:
            body = None
        if not is_callback(body, app.callback_map):
            abort(400)


def reject_invalid_values(app: Dash) -> None:
    """Rejects requests with values that make a callback fail, and logs the traceback.

    A page drawn by an older server may send such values.
    """

    # Raised by Dash and Python for missing values and values of the wrong type.
    @app.server.errorhandler(CallbackException)
    @app.server.errorhandler(LookupError)
    @app.server.errorhandler(TypeError)
    @app.server.errorhandler(ValueError)
    @app.server.errorhandler(AttributeError)
    def refuse(error: Exception) -> Response:
        if request.path != CALLBACK_PATH:
            raise error
        _LOGGER.warning("a callback request could not be answered", exc_info=error)
        return Response("this page can't be updated; load it again\n", status=400, mimetype="text/plain")


def is_callback(body: object, outputs: Collection[str]) -> bool:
    """Whether `body` has the form that Dash's script sends, for one of the `outputs`."""
    if not isinstance(body, dict) or not isinstance(body.get("output"), str) or body["output"] not in outputs:
        return False
    changed = body.get("changedPropIds", [])
    return (
        _all_named(body.get("outputs"))
        and _all_named(body.get("inputs"))
        and _all_named(body.get("state", []))
        and isinstance(changed, list)
        and all(isinstance(name, str) for name in changed)
    )


def _all_named(values: object) -> bool:
    """Whether these are properties of components with values of the right type."""
    if isinstance(values, dict):
        return _is_property(values)
    return isinstance(values, list) and all(
        _all_named(entry) if isinstance(entry, list) else isinstance(entry, dict) and _is_property(entry)
        for entry in values
    )


def _is_property(entry: Mapping[str, Any]) -> bool:
    name, value = entry.get("property"), entry.get("value")
    if not isinstance(entry.get("id"), str | dict) or not isinstance(name, str):
        return False
    if entry["id"] == "shown":
        return value is None or (isinstance(value, dict) and isinstance(value.get("path"), str))
    return name not in _TEXTS or value is None or isinstance(value, str)
