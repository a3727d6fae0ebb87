"""What the Prefect UI shows of a running campaign besides its tasks.

    status, every 2 s ─┬─► campaign-progress    a bar, updated in place, at most every 10 s
                       ├─► campaign-staleness   a table, a new one at most every 30 s: `flows.campaign_table`
                       ├─► campaign-summary     the figures, once, at the end
                       └─► pipeline.stalled, reward.collapsed: events, and a line in the log
    MILLRACE_DASHBOARD_URL ─► campaign-dashboard   a link, once

A thread looks at the store and tells Prefect on a best-effort basis: the campaign neither waits for the server nor
fails with it. The report at the end of an attempt is another's: `flows.campaign_report`.
"""

import logging
import os
import time
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.campaign_table import CampaignTable, Row
from flows.view import TRAINING, figures, phase
from millrace.background import Background
from millrace.run import latest_attempt
from millrace.stall import Trouble
from millrace.status import StatusReader
from storage.factory import open_store
from tasks.events import emit

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable: where a dashboard of the campaign is to be found, for a link in the Prefect UI."""
_EVERY_SECONDS = 2.0
_PROGRESS_SECONDS = 10.0
"""Least time between two updates of the bar: each is an event in the server's database."""
_LOGGER = logging.getLogger(__name__)


class Reporter(Background):
    """Reports while its `with` block lasts."""

    def __init__(self, run_url: str) -> None:
        # Not for ever: a server that is away must not hold the campaign's end up.
        super().__init__("reporter", join_seconds=5)
        store = open_store(run_url)
        self._run_url = run_url
        self._status = StatusReader(store)
        # Each unit of work moves something when it is done, and none takes longer.
        self._trouble = Trouble(stall_seconds=latest_attempt(store).config["supervision"]["hang_seconds"])

    def _run(self) -> None:
        shown = Artifacts()
        while True:
            over = self._over.wait(_EVERY_SECONDS)
            try:
                status = self._status.look()
                # First: it waits for nobody.
                self._tell_trouble(status)
                shown.look(status, over=over)
            except Exception:
                # Whatever the server or the way to it does: the state of record is the run's own. What is wrong with
                # the run, its stages say.
                _LOGGER.debug("nothing was reported to Prefect", exc_info=True)
            if over:
                return

    def _tell_trouble(self, status: dict[str, Any]) -> None:
        if phase(status) != TRAINING:
            return
        for event in self._trouble.look(status, time.monotonic()):
            get_run_logger().warning("%s: %s", event.kind, dict(event.payload))
            emit(event.kind, self._run_url, event.payload)


class Artifacts:
    """The artifacts of one campaign. A look raises where the server can't be reached; the next one makes up for it."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._steps = -1
        self._updated = 0.0
        self._linked = False
        self._table = CampaignTable(_write_table)

    def look(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows what is new in `status`; `over`: this is the last one."""
        if self._progress is None:
            self._progress = create_progress_artifact(0.0, key="campaign-progress", description="Optimizer steps")
        due = over or time.monotonic() - self._updated >= _PROGRESS_SECONDS
        if due and status["steps"] != self._steps:
            update_progress_artifact(self._progress, 100.0 * status["steps"] / status["max_steps"])
            self._steps, self._updated = status["steps"], time.monotonic()
        url = os.environ.get(DASHBOARD_URL)
        if url and not self._linked:
            create_link_artifact(
                url, link_text="dashboard", key="campaign-dashboard", description="This campaign, live"
            )
            self._linked = True
        self._table.look(status, over=over)
        if over:
            create_markdown_artifact(_figures(status), key="campaign-summary", description="The run in figures")


def _write_table(rows: list[Row]) -> None:
    create_table_artifact(
        rows,
        key="campaign-staleness",
        description="Speeds and shares since the table before; the rest so far",
    )


def _figures(status: dict[str, Any]) -> str:
    """Key figures as a markdown table."""
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures(status))
    return f"| figure | value |\n|---|---|\n{rows}\n"
