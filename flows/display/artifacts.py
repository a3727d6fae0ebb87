"""Artifacts of a run in the Prefect UI, and the last message of its flow run.

    status ─┬─► <run>-progress       a bar, updated in place at most every 10 s
            ├─► <run>-dashboard      a link to the run's page, once `MILLRACE_DASHBOARD_URL` is set
            ├─► <run>-figures        the key figures
            ├─► <run>-sources        figures of each source, if there are several
            ├─► <run>-evaluations    accuracy of each version evaluated
            └─► <run>-decisions      decisions about staleness and rollbacks

Each table stays in the server's database as a row, so a table is written only if it changed, at most every 30 s, and
once at the end.
"""

import logging
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from prefect import runtime
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)
from prefect.settings import PREFECT_UI_URL

from flows.display.key_figures import already_finished, decision_rows, evaluation_rows, figure_rows, source_rows
from flows.display.tables import Row
from millrace.evaluation.promotion import PromotionDecision

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable with the address of a dashboard, which the Prefect UI then links to."""
TABLE_SECONDS = 30.0
"""Least time between two tables of one kind."""
_PROGRESS_SECONDS = 10.0
"""Least time between two updates of the bar, because each is an event in the server's database."""
_LOGGER = logging.getLogger(__name__)


def artifact_key(run_id: str, what: str) -> str:
    """The key of an artifact of this run, such as `tiny-nightly-progress`.

    Prefect shows all artifacts of one key as one history, so each run has its own. A key has lowercase letters, digits
    and dashes only.
    """
    slug = re.sub(r"[^a-z0-9]+", "-", run_id.lower()).strip("-") or "run"
    return f"{slug}-{what}"


def dashboard_link(run_id: str) -> str | None:
    """The address of the run's page in the dashboard; None if no dashboard is known."""
    url = os.environ.get(DASHBOARD_URL)
    return f"{url.rstrip('/')}/run/{quote(run_id)}" if url else None


def flow_run_link() -> str | None:
    """The address of the current flow run in the Prefect UI; None outside a flow run, and without a server."""
    return runtime.flow_run.ui_url if PREFECT_UI_URL.value() else None


def show(markdown: str, *, key: str, description: str) -> None:
    """Adds `markdown` to the current flow run as the artifact `key`, if the server can be reached."""
    try:
        create_markdown_artifact(markdown, key=key, description=description)
    except Exception as error:
        # The work is done and recorded, whatever is wrong with the server.
        _LOGGER.warning("%s is in the run, but could not be shown in the Prefect UI: %s", key, error)
        _LOGGER.debug("why %s was not shown", key, exc_info=True)


def final_message(decision: PromotionDecision | None, status: dict[str, Any]) -> str:
    """The message of the flow run's last state, such as `v90 promoted, 0.340 → 0.570; version 90 of 400`."""
    finished = already_finished(status)
    progress = finished or f"version {status['steps']:,} of {status['max_steps']:,}"
    # An earlier attempt may have been killed before the gate, so a finished run may still be promoted.
    if decision is None or (finished and not decision.promoted):
        return progress
    return f"{decision.headline}; {progress}"


class Artifacts:
    """The artifacts of the run `run_id` while it runs. `clock` is a monotonic clock in seconds."""

    def __init__(self, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_id = run_id
        self._clock = clock
        self._bar: Any = None
        self._steps = -1
        self._updated = 0.0
        self._linked = False
        self._tables: dict[str, tuple[float, list[Row]]] = {}

    def update(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows the changes since the last call; `over`: this is the last one.

        Raises if the server can't be reached; the next call catches up.
        """
        now = self._clock()
        if self._bar is None:
            self._bar = create_progress_artifact(0.0, key=self._key("progress"), description="Optimizer steps")
        if (over or now - self._updated >= _PROGRESS_SECONDS) and status["steps"] != self._steps:
            update_progress_artifact(self._bar, 100.0 * status["steps"] / status["max_steps"])
            self._steps, self._updated = status["steps"], now
        if not self._linked and (url := dashboard_link(self._run_id)) is not None:
            create_link_artifact(url, "dashboard", key=self._key("dashboard"), description="This run, live")
            self._linked = True
        for name, rows, description in (
            ("figures", figure_rows(status), "The run in figures"),
            ("sources", source_rows(status), "Each source: weight, groups, newest reward and accuracy"),
            ("evaluations", evaluation_rows(status), "Accuracy of each version evaluated, with the 95 % interval"),
            ("decisions", decision_rows(status), "The latest decisions about staleness and rollbacks, with reasons"),
        ):
            written, former_rows = self._tables.get(name, (-math.inf, []))
            if rows != former_rows and (over or now - written >= TABLE_SECONDS):
                create_table_artifact(rows, key=self._key(name), description=description)
                self._tables[name] = (now, rows)

    def _key(self, what: str) -> str:
        return artifact_key(self._run_id, what)
