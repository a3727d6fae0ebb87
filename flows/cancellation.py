"""Whether a person has asked to cancel this very flow run: looked up by the flow itself.

Prefect's worker looks too, and ends the process. But it stops looking when the server was away for half a minute, it
may have been killed, and a campaign at a terminal has none.

    UI: Cancel ─► the server: Cancelling ◄── asked, every 5 s ── a thread of the campaign ─► its control loop: drain
"""

import contextlib
import contextvars
import threading
from types import TracebackType

import httpx
from prefect import runtime
from prefect.client.orchestration import get_client
from prefect.exceptions import PrefectException

_EVERY_SECONDS = 5.0


class Cancellation:
    """Looks while its `with` block lasts; the campaign neither waits for the server nor fails with it."""

    def __init__(self) -> None:
        self._flow_run_id = runtime.flow_run.id
        self._asked = threading.Event()
        self._over = threading.Event()
        # In a copy of this context, which says where the server is: without it, Prefect would start one of its own.
        context = contextvars.copy_context()
        self._thread = threading.Thread(target=context.run, args=(self._run,), name="cancellation", daemon=True)

    def asked(self) -> bool:
        """Whether it was asked for, as far as is known."""
        return self._asked.is_set()

    def __enter__(self) -> "Cancellation":
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._over.set()

    def _run(self) -> None:
        while not self._over.wait(_EVERY_SECONDS):
            # Where the server is away, it is asked again.
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                state = client.read_flow_run(self._flow_run_id).state
                if state is not None and (state.is_cancelling() or state.is_cancelled()):
                    self._asked.set()
                    return
