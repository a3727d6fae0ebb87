"""Polls the Prefect server: has a person cancelled or suspended this flow run? Continues one that was suspended.

    UI: Cancel  ─► server: Cancelling ◄─┬─ polled every 5 s ── a thread of the campaign ─► control loop: drain
    UI: Suspend ─► server: Suspended  ◄─┘
    UI: Resume  ─► a worker starts it again ─► the former process has drained? ─► the run's next attempt

Prefect's worker polls for cancellation too, and ends the process. But it stops polling once the server was away for
half a minute, it may have been killed, and a campaign at a terminal has no worker. Prefect itself acts on a suspension
only when the next task starts, which in a campaign is the evaluation at its end.
"""

import contextlib
import threading
import time
from collections.abc import Sequence

import httpx
from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client
from prefect.client.schemas.objects import State
from prefect.exceptions import PrefectException

from millrace.errors import RunMissing
from millrace.runs.record import latest_attempt, read_end, run_state
from millrace.runtime.background import Background
from storage.progress import read_progress
from storage.stores.base import Store

_POLL_SECONDS = 5.0
_DRAIN_POLL_SECONDS = 1.0


class Cancellation(Background):
    """Polls while its `with` block lasts. The campaign neither waits for the server nor fails with it.

    `former` is how often this flow run had been suspended when this process began.
    """

    def __init__(self, former: int) -> None:
        # An unreachable server must not delay the campaign's end.
        super().__init__("cancellation", join_seconds=0)
        self._flow_run_id = runtime.flow_run.id
        self._former = former
        self._asked = threading.Event()
        self._suspended: State | None = None

    def asked(self) -> bool:
        """Whether cancellation or suspension was requested, as far as is known."""
        return self._asked.is_set()

    @property
    def suspended(self) -> State | None:
        """The state in which a person suspended the flow run, though it may be resumed by now; None otherwise."""
        return self._suspended

    def _run(self) -> None:
        while not self._over.wait(_POLL_SECONDS):
            # An unreachable server is polled again.
            with contextlib.suppress(httpx.HTTPError, PrefectException), get_client(sync_client=True) as client:
                # All states, because the flow run may have been resumed between two polls.
                states = client.read_flow_run_states(self._flow_run_id)
                newest = max(states, key=lambda state: state.timestamp)
                if newest.is_cancelling() or newest.is_cancelled():
                    self._asked.set()
                    return
                if len(suspended := suspensions(states)) > self._former:
                    self._suspended = suspended[-1]
                    self._asked.set()
                    return


def suspensions(states: Sequence[State]) -> list[State]:
    """The states of a flow run in which its process should end, oldest first.

    Without rescheduling a paused flow run waits inside its process, so a campaign goes on in it.
    """
    suspended = [state for state in states if state.is_paused() and state.state_details.pause_reschedule]
    return sorted(suspended, key=lambda state: state.timestamp)


def num_suspensions() -> int:
    """How often this flow run was suspended before; Prefect suspends only those of a deployment.

    Raises httpx.HTTPError if the server that has just started it can't be reached.
    """
    if runtime.deployment.id is None:
        return 0
    with get_client(sync_client=True) as client:
        return len(suspensions(client.read_flow_run_states(runtime.flow_run.id)))


def wait_for_former(store: Store, seconds: float) -> None:
    """Waits until no other process works on the run, this long at most. Later, its fence decides.

    A person may resume a flow run while its stages still drain.
    """
    deadline = time.monotonic() + seconds
    if _at_work(store):
        get_run_logger().info("the attempt before this one still drains: waiting for its end")
    while time.monotonic() < deadline and _at_work(store):
        time.sleep(_DRAIN_POLL_SECONDS)


def _at_work(store: Store) -> bool:
    try:
        attempt = latest_attempt(store)
    except RunMissing:
        return False
    end = read_end(store, attempt.number)
    state, _ = run_state(end, attempt.t_started, read_progress(store))
    return state == "running"
