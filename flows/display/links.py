"""Names and addresses of a run in the Prefect UI: artifact keys, and links to its pages there and in the dashboard."""

import os
import re
from urllib.parse import quote

from prefect import runtime
from prefect.settings import PREFECT_UI_URL

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable with the address of a dashboard, which the Prefect UI then links to."""


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
