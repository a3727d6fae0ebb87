"""The artifacts of a campaign in the Prefect UI. The run stores everything that they show."""

import logging
import time
from typing import Any

from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.display import decision_table, evaluation_table
from flows.display.key_figures import figures
from flows.display.links import artifact_key, dashboard_link
from flows.display.progress_table import EVERY_SECONDS, CampaignTable, Row

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
    """The artifacts of the run `run_id`. `look` raises if the server can't be reached; the next call catches up."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._progress: Any = None
        self._steps = -1
        self._updated = 0.0
        self._linked = False
        self._table = CampaignTable(self._write_table)
        self._evaluations: list[evaluation_table.Row] = []
        self._evaluated = 0.0
        self._decisions: list[decision_table.Row] = []
        self._decided = 0.0

    def look(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows what is new in `status`; `over`: this is the last call."""
        if self._progress is None:
            self._progress = create_progress_artifact(0.0, key=self._key("progress"), description="Optimizer steps")
        due = over or time.monotonic() - self._updated >= _PROGRESS_SECONDS
        if due and status["steps"] != self._steps:
            update_progress_artifact(self._progress, 100.0 * status["steps"] / status["max_steps"])
            self._steps, self._updated = status["steps"], time.monotonic()
        if not self._linked and (url := dashboard_link(self._run_id)) is not None:
            description = "This run, live"
            create_link_artifact(url, "dashboard", key=self._key("dashboard"), description=description)
            self._linked = True
        self._table.look(status, over=over)
        self._look_at_evaluations(status, over=over)
        self._look_at_decisions(status, over=over)
        if over:
            create_markdown_artifact(_figures(status), key=self._key("summary"), description="The run in figures")

    def _look_at_evaluations(self, status: dict[str, Any], *, over: bool) -> None:
        found = evaluation_table.rows(status)
        if found == self._evaluations or not (over or time.monotonic() - self._evaluated >= EVERY_SECONDS):
            return
        description = "Accuracy of each version evaluated, with the 95 % interval"
        create_table_artifact(found, key=self._key("evaluations"), description=description)
        self._evaluations, self._evaluated = found, time.monotonic()

    def _look_at_decisions(self, status: dict[str, Any], *, over: bool) -> None:
        found = decision_table.rows(status)
        if found == self._decisions or not (over or time.monotonic() - self._decided >= EVERY_SECONDS):
            return
        description = "The latest decisions about staleness and rollbacks, and why they were made"
        create_table_artifact(found, key=self._key("decisions"), description=description)
        self._decisions, self._decided = found, time.monotonic()

    def _write_table(self, rows: list[Row]) -> None:
        description = "Speeds and shares since the last table; the rest since the start of the run"
        create_table_artifact(rows, key=self._key("staleness"), description=description)

    def _key(self, what: str) -> str:
        return artifact_key(self._run_id, what)


def _figures(status: dict[str, Any]) -> str:
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures(status))
    return f"| figure | value |\n|---|---|\n{rows}\n"
