"""Reports a running campaign to the Prefect UI, in addition to its tasks.

    status, every 2 s ─┬─► <run>-progress    a bar, updated in place at most every 10 s
                       ├─► <run>-staleness   a new table at most every 30 s: `flows.display.progress_table`
                       ├─► <run>-summary     the key figures, once at the end
                       └─► pipeline.stalled: an event and a line in the log
    MILLRACE_DASHBOARD_URL ─► <run>-dashboard   a link to the run's page, once

A thread reads the store and reports on a best-effort basis: the campaign neither waits for the server nor fails with
it. `flows.campaign.report` writes the report at the end of an attempt.
"""

import logging
import time
from pathlib import PurePosixPath
from typing import Any

from prefect import get_run_logger

from flows.display.artifacts import Artifacts
from flows.display.progress import STARTING_TRAINER, TRAINING, phase
from millrace.runs.record import latest_attempt
from millrace.runs.status import StatusReader
from millrace.runtime.background import Background
from millrace.runtime.stalls import StallDetector
from storage.stores.factory import open_store
from tasks.events import emit

_POLL_SECONDS = 2.0
_LOGGER = logging.getLogger(__name__)


class Reporter(Background):
    """Reports while its `with` block lasts."""

    def __init__(self, run_url: str) -> None:
        # An unreachable server must not delay the campaign's end.
        super().__init__("reporter", join_seconds=5)
        store = open_store(run_url)
        self._run_url = run_url
        self._run_id = PurePosixPath(run_url).name
        self._status = StatusReader(store)
        # Every unit of work changes a count when it is done, or meanwhile, as often as it sends heartbeats.
        self._stalls = StallDetector(latest_attempt(store).config["supervision"]["hang_seconds"])

    def _run(self) -> None:
        artifacts = Artifacts(self._run_id)
        while True:
            over = self._over.wait(_POLL_SECONDS)
            try:
                status = self._status.look()
                # First, because it does not wait for the server.
                self._report_stall(status)
                artifacts.look(status, over=over)
            except Exception:
                # Problems of the server do not matter: the run is the record. Its stages report problems of the run.
                _LOGGER.debug("nothing was reported to Prefect", exc_info=True)
            if over:
                return

    def _report_stall(self, status: dict[str, Any]) -> None:
        if phase(status).name not in (STARTING_TRAINER, TRAINING):
            return
        if (event := self._stalls.look(status, time.monotonic())) is not None:
            get_run_logger().warning("%s: %s", event.kind, dict(event.payload))
            emit(event.kind, self._run_url, event.payload)
