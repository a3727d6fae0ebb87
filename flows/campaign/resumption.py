"""Continues a flow run that was suspended in the Prefect UI: the same flow run, in another process.

Suspended ─► UI: Resume ─► a worker starts it again ─► the former process has drained? ─► the run's next attempt
"""

import time

from prefect import get_run_logger, runtime
from prefect.client.orchestration import get_client

from flows.campaign.cancellation import suspensions
from millrace.errors import RunMissing
from millrace.runs.record import latest_attempt, read_end, run_state
from storage.progress import read_progress
from storage.stores.base import Store

_POLL_SECONDS = 1.0


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
    said = False
    while time.monotonic() < deadline and _at_work(store):
        if not said:
            get_run_logger().info("the attempt before this one still drains: waiting for its end")
            said = True
        time.sleep(_POLL_SECONDS)


def _at_work(store: Store) -> bool:
    try:
        attempt = latest_attempt(store)
    except RunMissing:
        return False
    end = read_end(store, attempt.number)
    return run_state(end, attempt.t_started, read_progress(store)).name == "running"
