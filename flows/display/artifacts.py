"""Artifacts of a run in the Prefect UI, and the last message of its flow run.

    status ─┬─► <run>-progress       a bar
            ├─► <run>-dashboard      a link to the run's page, once `MILLRACE_DASHBOARD_URL` is set
            ├─► <run>-figures        the key figures
            ├─► <run>-sources        figures of each source, if there are several
            ├─► <run>-evaluations    accuracy of each version evaluated
            ├─► <run>-decisions      decisions about staleness and rollbacks
            └─► <run>-report         what to read first, at the end (`flows.campaign.report`)

Each has one card on the flow run's page, which is updated in place. Each update is an event in the server's database,
so an artifact is written only if it changed, a table at most every 30 s, the bar every 10 s, and once at the end.
"""

import json
import logging
import math
import os
import re
import time
from collections.abc import Callable
from typing import Any
from urllib.parse import quote
from uuid import UUID

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.actions import ArtifactCreate, ArtifactUpdate
from prefect.client.schemas.filters import ArtifactFilter, ArtifactFilterFlowRunId, ArtifactFilterKey
from prefect.settings import PREFECT_UI_URL

from flows.display.key_figures import already_finished, decision_rows, evaluation_rows, figure_rows, source_rows
from millrace.evaluation.promotion import PromotionDecision

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable with the address of a dashboard, which the Prefect UI then links to."""
TABLE_SECONDS = 30.0
"""Least time between two updates of a table."""
PROGRESS_SECONDS = 10.0
"""Least time between two updates of the bar."""
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
    """The artifacts of the run `run_id` while it runs, one of each kind. `clock` is a monotonic clock in seconds."""

    def __init__(
        self, server: SyncPrefectClient, run_id: str, flow_run_id: UUID, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._server = server
        self._run_id = run_id
        self._flow_run_id = flow_run_id
        self._clock = clock
        self._ids: dict[str, UUID] = {}
        self._shown: dict[str, tuple[float, Any]] = {}

    def update(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows the changes since the last call; `over`: this is the last one.

        Raises if the server can't be reached; the next call catches up.
        """
        now = self._clock()
        url = dashboard_link(self._run_id)
        self._put("progress", 100.0 * status["steps"] / status["max_steps"], "Optimizer steps", now, over)
        self._put("dashboard", url and f"[dashboard]({url})", "This run, live", now, over)
        for name, rows, description in (
            ("figures", figure_rows(status), "The run in figures"),
            ("sources", source_rows(status), "Each source: weight, groups, newest reward and accuracy"),
            ("evaluations", evaluation_rows(status), "Accuracy of each version evaluated, with the 95 % interval"),
            ("decisions", decision_rows(status), "The latest decisions about staleness and rollbacks, with reasons"),
        ):
            self._put(name, json.dumps(rows) if rows else None, description, now, over)

    def _put(self, name: str, data: float | str | None, description: str, now: float, over: bool) -> None:
        """Creates or updates the artifact unless `data` is None, already shown, or too early."""
        written, former = self._shown.get(name, (-math.inf, None))
        seconds = PROGRESS_SECONDS if name == "progress" else TABLE_SECONDS
        if data is None or data == former or not (over or now - written >= seconds):
            return
        key = artifact_key(self._run_id, name)
        if name not in self._ids:
            # A flow run that was suspended continues the artifacts of its former process.
            mine = ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=[self._flow_run_id]), key=ArtifactFilterKey(any_=[key])
            )
            for existing in self._server.read_artifacts(artifact_filter=mine):
                self._ids[name] = existing.id
        if name in self._ids:
            self._server.update_artifact(self._ids[name], ArtifactUpdate(data=data))
        else:
            kind = {"progress": "progress", "dashboard": "markdown"}.get(name, "table")
            artifact = ArtifactCreate(
                key=key, type=kind, data=data, description=description, flow_run_id=self._flow_run_id
            )
            self._ids[name] = self._server.create_artifact(artifact).id
        self._shown[name] = now, data
