"""Events of a run, as Prefect knows them: what an automation can be triggered by.

emit ─► Prefect's queue ─► Prefect's thread ─► server; flow run, task run and deployment are added as related resources
"""

import logging
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any

from prefect.events import emit_event
from prefect.settings import PREFECT_API_URL

from millrace.events import EventKind

_LOGGER = logging.getLogger(__name__)


def emit(kind: EventKind, run_url: str, payload: Mapping[str, Any]) -> None:
    """Puts the event `millrace.<kind>` of the resource `millrace.run.<run id>` on its way to Prefect's server.

    Call it in the context of a flow run or task run, so that the event is related to it. It neither waits for the
    server nor fails: an event that can't be sent is lost, and what happened is in the run and in the logs all the same.
    """
    if PREFECT_API_URL.value() is None:
        # Prefect would start a server of its own for it, and wait until that answers.
        return
    run_id = PurePosixPath(run_url).name
    resource = {"prefect.resource.id": f"millrace.run.{run_id}", "prefect.resource.name": run_id}
    try:
        emit_event(f"millrace.{kind}", resource=resource, payload={"run_url": run_url, **payload})
    except Exception:
        # Whatever it is, too large a payload or a client that is shutting down: the campaign goes on.
        _LOGGER.debug("event %s was not sent", kind, exc_info=True)
