"""Exchanges events and states with the Prefect server; the campaign neither waits for the server nor fails with it.

emit ─┬─► Prefect's queue ─► Prefect's thread ─► server: automations; flow run, task run and deployment are related
      └─► incidents/ in the run, for people (`millrace.runs.incidents`)
FlowRunStates ◄── polled every 5 s ── server
show_running ─► the message of the state Running ─► server
"""

import contextlib
import logging
from collections.abc import Mapping
from pathlib import PurePosixPath
from typing import Any, Protocol
from uuid import UUID

import httpx
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.events import emit_event
from prefect.exceptions import PrefectException
from prefect.settings import PREFECT_API_URL
from prefect.states import Running

from millrace.runs.incidents import record_incident
from millrace.runtime.background import Background
from millrace.runtime.messages import EventKind
from storage.errors import StorageError
from storage.stores.factory import open_store

_POLL_SECONDS = 5.0
_LOGGER = logging.getLogger(__name__)


def emit(kind: EventKind, run_url: str, payload: Mapping[str, Any]) -> None:
    """Sends the event `millrace.<kind>` of the resource `millrace.run.<run id>` to Prefect's server.

    Call it in the context of the flow run or task run that the event belongs to. An event that can't be sent is lost;
    the run and the logs have the facts anyway. An incident is also stored in the run.
    """
    try:
        record_incident(open_store(run_url), kind, payload)
    except (StorageError, OSError):
        # The stages report problems of the store themselves.
        _LOGGER.debug("incident %s was not stored", kind, exc_info=True)
    if PREFECT_API_URL.value() is None:
        # Prefect would start a server for the event, and wait for it.
        return
    run_id = PurePosixPath(run_url).name
    resource = {"prefect.resource.id": f"millrace.run.{run_id}", "prefect.resource.name": run_id}
    try:
        emit_event(f"millrace.{kind}", resource=resource, payload={"run_url": run_url, **payload})
    except Exception:
        # For example a payload that is too large, or a client that is shutting down.
        _LOGGER.debug("event %s was not sent", kind, exc_info=True)


class FlowRunStates(Background):
    """Polls the states of a flow run during a `with` block, in a thread, because an absent server blocks requests."""

    def __init__(self, flow_run_id: Any) -> None:
        super().__init__(f"states of {flow_run_id}", join_seconds=0)
        self.states: list[State] = []
        """All states so far, oldest first; empty before the first poll."""
        self._id = flow_run_id

    def _run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            with contextlib.suppress(httpx.HTTPError, PrefectException):
                self.states = read_states(self._id)


def read_states(flow_run_id: Any) -> list[State]:
    """The states of a flow run, oldest first. Raises httpx.HTTPError if the server can't be reached."""
    with get_client(sync_client=True) as client:
        return _sorted_states(client, flow_run_id)


class StateServer(Protocol):
    """The part of Prefect's client that reads and sets states of flow runs."""

    def read_flow_run_states(self, flow_run_id: UUID) -> list[State]: ...

    def set_flow_run_state(self, flow_run_id: UUID, state: State, force: bool = False) -> object: ...


def show_running(server: StateServer, flow_run_id: UUID, message: str) -> None:
    """Makes `message` the message of a flow run's state, if that is Running.

    A state's message can't be changed, so this sets another Running. The server can't compare: if a person suspends or
    cancels the flow run between the look and the change, that state is set again. Raises httpx.HTTPError if the server
    can't be reached.
    """
    if not _sorted_states(server, flow_run_id)[-1].is_running():
        return
    server.set_flow_run_state(flow_run_id, Running(message=message))
    *_, before, current = _sorted_states(server, flow_run_id)
    if current.message == message and not before.is_running():
        # By force, because Prefect accepts each suspension once.
        server.set_flow_run_state(flow_run_id, before, force=True)


def _sorted_states(server: StateServer, flow_run_id: UUID) -> list[State]:
    return sorted(server.read_flow_run_states(flow_run_id), key=lambda state: state.timestamp)
