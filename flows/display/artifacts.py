"""The artifacts of a campaign in the Prefect UI. The run stores everything that they show."""

import logging
import os
import time
from typing import Any

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.display import evaluation_table
from flows.display.key_figures import figures
from flows.display.progress_table import EVERY_SECONDS, CampaignTable, Row

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable with the address of a dashboard, which the Prefect UI then links to."""
_PROGRESS_SECONDS = 10.0
"""Minimum time between two updates of the bar, because each is an event in the server's database."""
_LOGGER = logging.getLogger(__name__)


def show(markdown: str, *, key: str, description: str) -> None:
    """Adds `markdown` to the current flow run as the artifact `key`, if the server can be reached."""
    try:
        create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:
        # The work is done and recorded, whatever is wrong with the server.
        _LOGGER.warning("%s is in the run, but could not be shown in the Prefect UI: %s", key, error)
        _LOGGER.debug("why %s was not shown", key, exc_info=True)


class Artifacts:
    """The artifacts of one campaign. `look` raises if the server can't be reached; the next call catches up."""

    def __init__(self) -> None:
        self._progress: Any = None
        self._steps = -1
        self._updated = 0.0
        self._linked = False
        self._table = CampaignTable(_write_table)
        self._evaluations: list[evaluation_table.Row] = []
        self._evaluated = 0.0

    def look(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows what is new in `status`; `over`: this is the last call."""
        if self._progress is None:
            self._progress = create_progress_artifact(0.0, key="campaign-progress", description="Optimizer steps")
        due = over or time.monotonic() - self._updated >= _PROGRESS_SECONDS
        if due and status["steps"] != self._steps:
            update_progress_artifact(self._progress, 100.0 * status["steps"] / status["max_steps"])
            self._steps, self._updated = status["steps"], time.monotonic()
        url = os.environ.get(DASHBOARD_URL)
        if url and not self._linked:
            create_link_artifact(url, "dashboard", key="campaign-dashboard", description="This campaign, live")
            self._linked = True
        self._table.look(status, over=over)
        self._look_at_evaluations(status, over=over)
        if over:
            create_markdown_artifact(_figures(status), key="campaign-summary", description="The run in figures")

    def _look_at_evaluations(self, status: dict[str, Any], *, over: bool) -> None:
        found = evaluation_table.rows(status)
        if found == self._evaluations or not (over or time.monotonic() - self._evaluated >= EVERY_SECONDS):
            return
        description = "Accuracy of each version evaluated, with the 95 % interval"
        create_table_artifact(found, key="campaign-evaluations", description=description)
        self._evaluations, self._evaluated = found, time.monotonic()


def _write_table(rows: list[Row]) -> None:
    description = "Speeds and shares since the last table; the rest since the start of the run"
    create_table_artifact(rows, key="campaign-staleness", description=description)


def _figures(status: dict[str, Any]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures(status))
    return f"| figure | value |\n|---|---|\n{rows}\n"
