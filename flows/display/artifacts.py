"""Artifacts of a run in the Prefect UI: their keys, links, the last message, the card of a promotion."""

import logging
import os
import re
from typing import Any
from urllib.parse import quote

from prefect import runtime
from prefect.artifacts import create_markdown_artifact
from prefect.settings import PREFECT_UI_URL

from flows.display.key_figures import already_finished
from flows.display.tables import as_markdown
from millrace.evaluation.promotion import Decision

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable with the address of a dashboard, which the Prefect UI then links to."""
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


def final_message(decision: Decision | None, status: dict[str, Any]) -> str:
    """The message of the flow run's last state, such as `v90 promoted, 0.340 → 0.570; version 90 of 400`."""
    finished = already_finished(status)
    progress = finished or f"version {status['steps']:,} of {status['max_steps']:,}"
    # An earlier attempt may have been killed before the gate, so a finished run may still be promoted.
    if decision is None or (finished and not decision.promoted):
        return progress
    return f"{decision.headline}; {progress}"


def promoted_card(run_url: str, run_id: str, decision: Decision) -> str:
    """A promotion as Markdown: which version, how much better it is, and where its files are."""
    rows = {
        "version": f"{decision.policy_version:,}",
        "held-out accuracy": "–" if decision.accuracy is None else f"{decision.accuracy:.4f}",
        "before": "–" if decision.bar is None else f"{decision.bar:.4f}",
        "files": f"`{run_url}/weights/promoted`",
        "as a Hugging Face folder": f"`millrace export {run_url} --to FOLDER --promoted`",
    }
    table = as_markdown([{"checkpoint": name, " ": value} for name, value in rows.items()])
    parts = [f"# {decision.headline}", f"The gate: {decision.sentence}.", table]
    if (link := dashboard_link(run_id)) is not None:
        parts.append(f"[The run in the dashboard]({link})")
    return "\n\n".join(parts)
