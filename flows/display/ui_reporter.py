"""Reports a running campaign to the Prefect UI, in addition to its tasks.

    status, every 2 s ─┬─► name of the flow run, once: `tiny-nightly, attempt 3`
                       ├─► message of its state Running: `v142/150, reward 0.63`, less often in a long attempt
                       ├─► artifacts: progress and tables (`flows.display.artifacts`)
                       └─► nothing moves for `hang_seconds`: the event pipeline.stalled, and a line in the log

A thread reads the store and reports on a best-effort basis: the campaign neither waits for the server nor fails with
it, and the run stores everything that is shown.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any
from uuid import UUID

from prefect import get_run_logger, runtime
from prefect.client.orchestration import SyncPrefectClient, get_client

from flows.display.artifacts import Artifacts
from flows.display.key_figures import STARTING_TRAINER, TRAINING, phase, progress_line
from millrace.runs.record import latest_attempt
from millrace.runs.status import STAGES, StatusReader
from millrace.runtime.background import Background
from millrace.runtime.messages import LOADING, STARTING, STOPPED, Event
from storage.stores.factory import open_store
from tasks.events import emit, show_running

_POLL_SECONDS = 2.0
MESSAGE_SECONDS = 15.0
"""Least time between two messages."""
_SHARE_OF_ATTEMPT = 0.01
"""Least time between two messages, as a share of the attempt's time so far."""
_LOGGER = logging.getLogger(__name__)


class UiReporter(Background):
    """Reports while its `with` block lasts."""

    def __init__(self, run_url: str) -> None:
        # An unreachable server must not delay the campaign's end.
        super().__init__("reporter", join_seconds=5)
        store = open_store(run_url)
        self._run_url = run_url
        self._status = StatusReader(store)
        # Every unit of work changes a count when it is done, or meanwhile, as often as it sends heartbeats.
        self._stalls = StallDetector(latest_attempt(store).config["supervision"]["hang_seconds"])

    def _run(self) -> None:
        flow_run_id = UUID(runtime.flow_run.id)
        with get_client(sync_client=True) as server:
            artifacts = Artifacts(server, PurePosixPath(self._run_url).name, flow_run_id)
            self._report(FlowRunHeader(server, flow_run_id), artifacts)

    def _report(self, header: "FlowRunHeader", artifacts: Artifacts) -> None:
        over = False
        while not over:
            over = self._over.wait(_POLL_SECONDS)
            try:
                status = self._status.look()
                # First, because it does not wait for the server.
                self._report_stall(status)
                if not over:
                    header.update(status)
                artifacts.update(status, over=over)
            except Exception:
                # Problems of the server do not matter: the run is the record. Its stages report problems of the run.
                _LOGGER.debug("nothing was reported to Prefect", exc_info=True)

    def _report_stall(self, status: dict[str, Any]) -> None:
        if phase(status).name not in (STARTING_TRAINER, TRAINING):
            return
        if (event := self._stalls.look(status, time.monotonic())) is not None:
            get_run_logger().warning("%s: %s", event.kind, dict(event.payload))
            emit(event.kind, self._run_url, event.payload)


class FlowRunHeader:
    """Name and message of one flow run. `clock` is a monotonic clock in seconds.

    Each message is a state in the server's database. An attempt of an hour writes at most 200, one of a week 700.
    """

    def __init__(
        self, server: SyncPrefectClient, flow_run_id: UUID, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._flow_run_id = flow_run_id
        self._clock = clock
        self._named = False
        self._message = ""
        self._written = -math.inf

    def update(self, status: dict[str, Any]) -> None:
        """Shows the changes since the last call. Raises if the server can't be reached; the next call catches up."""
        if not self._named:
            name = f"{status['run_id']}, attempt {status['attempt']}"
            self._server.set_flow_run_name(self._flow_run_id, name)
            self._named = True
        message, now = progress_line(status), self._clock()
        pause = max(MESSAGE_SECONDS, _SHARE_OF_ATTEMPT * status["wall_seconds"])
        if status["state"] == "running" and message != self._message and now - self._written >= pause:
            # Noted first: a request that seemed to fail may have arrived.
            self._message, self._written = message, now
            show_running(self._server, self._flow_run_id, message)


class StallDetector:
    """Detects that nothing moves: no trajectory generated, scored, trained or dropped, no optimizer step, and no
    progress within one.

    Stages that all send heartbeats may still wait for each other for ever. Time does not count while a stage starts or
    loads its model, for which its supervisor has its own limit, or while one has not started yet or has drained. Call
    it only while the run trains.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._counts: Mapping[str, Any] | None = None
        self._moved = 0.0
        self._reported = False

    def look(self, status: Mapping[str, Any], now: float) -> Event | None:
        """Returns `pipeline.stalled` once per stall, with the activity of each stage."""
        counts = {name: status[name] for name in ("ledger", "steps", "advances")}
        excused = any(
            name.rpartition("-")[0] in STAGES and activity in (STARTING, LOADING, STOPPED)
            for name, activity in status["doing"].items()
        )
        if counts != self._counts or excused:
            self._counts, self._moved, self._reported = counts, now, False
            return None
        silent = now - self._moved
        if self._reported or silent < self._seconds:
            return None
        self._reported = True
        return Event(kind="pipeline.stalled", payload={"seconds": round(silent, 1), "doing": dict(status["doing"])})
