"""Sends the events of a run to Prefect, where they can trigger automations, and keeps incidents in the run itself.

emit ─┬─► Prefect's queue ─► Prefect's thread ─► server, which adds flow run, task run and deployment as related
      │                                                                                                 resources
      └─► incidents/ in the run: what a person should read (`millrace.runs.incidents`)
"""

import logging
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

from millrace.runs.incidents import record_incident
from millrace.runtime.messages import EventKind
from storage.errors import StorageError
from storage.stores.factory import open_store

_LOGGER = logging.getLogger(__name__)


def emit(kind: EventKind, run_url: str, payload: Mapping[str, Any]) -> None:
    """Sends the event `millrace.<kind>` of the resource `millrace.run.<run id>` to Prefect's server.

    Call it in the context of a flow run or task run, which the event is then related to. It neither waits for the
    server nor fails. An event that can't be sent is lost; the run and the logs hold what happened anyway. An incident
    is also stored in the run.
    """
    try:
        record_incident(open_store(run_url), kind, payload)
    except (StorageError, OSError):
        # The stages report problems of the store themselves.
        _LOGGER.debug("incident %s was not stored", kind, exc_info=True)
    if PREFECT_API_URL.value() is None:
        # Prefect would start a server of its own for the event, and wait for it.
        return
    run_id = PurePosixPath(run_url).name
    resource = {"prefect.resource.id": f"millrace.run.{run_id}", "prefect.resource.name": run_id}
    try:
        emit_event(f"millrace.{kind}", resource=resource, payload={"run_url": run_url, **payload})
    except Exception:
        # For example too large a payload, or a client that is shutting down: the campaign goes on.
        _LOGGER.debug("event %s was not sent", kind, exc_info=True)
