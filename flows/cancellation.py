"""Whether a person has asked to cancel this very flow run: looked up by the flow itself.

Prefect's worker looks too, and ends the process. But it stops looking when the server was away for half a minute, it
may have been killed, and a campaign at a terminal has none.

    UI: Cancel ─► the server: Cancelling ◄── asked, every 5 s ── a thread of the campaign ─► its control loop: drain
"""

import contextlib
import threading

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

from millrace.background import Background

_EVERY_SECONDS = 5.0


class Cancellation(Background):
    """Looks while its `with` block lasts; the campaign neither waits for the server nor fails with it."""

    def __init__(self) -> None:
        # A server that is away must not hold the campaign's end up.
        super().__init__("cancellation", join_seconds=0)
        self._flow_run_id = runtime.flow_run.id
        self._asked = threading.Event()

    def asked(self) -> bool:
        """Whether it was asked for, as far as is known."""
        return self._asked.is_set()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            # Where the server is away, it is asked again.
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                state = client.read_flow_run(self._flow_run_id).state
                if state is not None and (state.is_cancelling() or state.is_cancelled()):
                    self._asked.set()
                    return
