"""Polls the Prefect server: has a person cancelled this flow run?

    UI: Cancel ─► server: Cancelling ◄── polled every 5 s ── a thread of the campaign ─► control loop: drain

Prefect's worker polls too, and ends the process. But it stops polling once the server was away for half a minute, it
may have been killed, and a campaign at a terminal has no worker.
"""

import contextlib
import threading

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

from millrace.runtime.background import Background

_POLL_SECONDS = 5.0


class Cancellation(Background):
    """Polls while its `with` block lasts. The campaign neither waits for the server nor fails with it."""

    def __init__(self) -> None:
        # An unreachable server must not delay the campaign's end.
        super().__init__("cancellation", join_seconds=0)
        self._flow_run_id = runtime.flow_run.id
        self._asked = threading.Event()

    def asked(self) -> bool:
        """Whether cancellation was requested, as far as is known."""
        return self._asked.is_set()

    def _run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            # An unreachable server is polled again.
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                state = client.read_flow_run(self._flow_run_id).state
                if state is not None and (state.is_cancelling() or state.is_cancelled()):
                    self._asked.set()
                    return
