"""What a campaign shows in the Prefect UI: artifacts, links, and the message of its last state.

    <run>-progress       a bar, updated in place at most every 10 s
    <run>-staleness      speed and share of each stage since the last table, queue, staleness; so far
    <run>-evaluations    accuracy of each version evaluated
    <run>-decisions      decisions about staleness and rollbacks
    <run>-dashboard      a link to the run's page, once `MILLRACE_DASHBOARD_URL` is set
    <run>-summary        the key figures, once at the end
    <run>-promoted       a promoted checkpoint

Each table stays in the server's database as a row. So one is written only if something changed, at most every 30 s, and
once at the end. The run stores everything that they show.
"""

import logging
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

from flows.display.key_figures import Row, already_finished, as_markdown, decision_rows, evaluation_rows, figures
from flows.display.progress import Rates
from millrace.evaluation.promotion import Decision

DASHBOARD_URL = "MILLRACE_DASHBOARD_URL"
"""Environment variable with the address of a dashboard, which the Prefect UI then links to."""
EVERY_SECONDS = 30.0
"""Least time between two tables of one kind."""
_PROGRESS_SECONDS = 10.0
"""Minimum time between two updates of the bar, because each is an event in the server's database."""
_STAGES = {"generate": "generate", "score": "score", "train": "train", "sync_weights": "sync"}
"""Stage → its key in the `seconds` of a status."""
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
    if (finished := already_finished(status)) is not None:
        # A former attempt may have been killed before the gate.
        return f"{decision.headline}; {finished}" if decision is not None and decision.promoted else finished
    reached = f"version {status['steps']:,} of {status['max_steps']:,}"
    return reached if decision is None else f"{decision.headline}; {reached}"


def promoted_card(run_url: str, run_id: str, decision: Decision) -> str:
    """A promotion as Markdown: which version, how much better it is, and where its files are."""
    rows = [
        ("version", f"{decision.policy_version:,}"),
        ("held-out accuracy", "–" if decision.accuracy is None else f"{decision.accuracy:.4f}"),
        ("before", "–" if decision.bar is None else f"{decision.bar:.4f}"),
        ("files", f"`{run_url}/weights/promoted`"),
        ("as a Hugging Face folder", f"`millrace export {run_url} --to FOLDER --promoted`"),
    ]
    link = dashboard_link(run_id)
    return "\n\n".join(
        [
            f"# {decision.headline}",
            f"The gate: {decision.sentence}.",
            as_markdown([{"checkpoint": name, " ": value} for name, value in rows]),
            *([] if link is None else [f"[The run in the dashboard]({link})"]),
        ]
    )


class Artifacts:
    """The artifacts of the run `run_id` while it runs.

    `write_table` is called with (rows, key, description). `clock` is a monotonic clock in seconds.
    """

    def __init__(
        self,
        run_id: str,
        write_table: Callable[[list[Row], str, str], object] = lambda rows, key, what: create_table_artifact(
            rows, key=key, description=what
        ),
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._run_id = run_id
        self._write_table = write_table
        self._clock = clock
        self._progress: Any = None
        self._steps = -1
        self._updated = 0.0
        self._linked = False
        self._rates = Rates(clock)
        self._before: dict[str, Any] | None = None
        self._shown: dict[str, object] = {}
        self._written: dict[str, float] = {}

    def look(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows what is new in `status`; `over`: this is the last call.

        Raises if the server can't be reached; the next call catches up.
        """
        if self._progress is None:
            self._progress = create_progress_artifact(0.0, key=self._key("progress"), description="Optimizer steps")
        if (over or self._clock() - self._updated >= _PROGRESS_SECONDS) and status["steps"] != self._steps:
            update_progress_artifact(self._progress, 100.0 * status["steps"] / status["max_steps"])
            self._steps, self._updated = status["steps"], self._clock()
        if not self._linked and (url := dashboard_link(self._run_id)) is not None:
            description = "This run, live"
            create_link_artifact(url, "dashboard", key=self._key("dashboard"), description=description)
            self._linked = True
        self.look_at_tables(status, over=over)
        if over:
            summary = as_markdown([{"figure": name, "value": value} for name, value in figures(status)])
            create_markdown_artifact(summary, key=self._key("summary"), description="The run in figures")

    def look_at_tables(self, status: dict[str, Any], *, over: bool) -> None:
        """Writes the tables that are due. Raises as `look` does."""
        if self._before is None:
            # Rates need two statuses: this one is the start.
            self._rates.look(status)
            self._before, self._written["staleness"] = status, self._clock()
        content = {name: status[name] for name in ("tokens", "steps", "ledger", "staleness")}
        if self._is_due("staleness", content, over):
            rows = stage_rows(status, self._before, self._rates.look(status))
            self._before = status
            description = "Speeds and shares since the last table; the rest since the start of the run"
            self._write("staleness", rows, content, description)
        for what, rows, description in (
            ("evaluations", evaluation_rows(status), "Accuracy of each version evaluated, with the 95 % interval"),
            (
                "decisions",
                decision_rows(status),
                "The latest decisions about staleness and rollbacks, and why they were made",
            ),
        ):
            if rows and self._is_due(what, rows, over):
                self._write(what, rows, rows, description)

    def _is_due(self, what: str, content: object, over: bool) -> bool:
        waited = self._clock() - self._written.get(what, -EVERY_SECONDS)
        return content != self._shown.get(what) and (over or waited >= EVERY_SECONDS)

    def _write(self, what: str, rows: list[Row], content: object, description: str) -> None:
        self._written[what] = self._clock()
        self._write_table(rows, self._key(what), description)
        self._shown[what] = content

    def _key(self, what: str) -> str:
        return artifact_key(self._run_id, what)


def stage_rows(status: dict[str, Any], before: dict[str, Any], rates: dict[str, float]) -> list[Row]:
    """The table `staleness`. `before`: the status at the last table; `rates`: tokens per second since, by stage."""
    ledger, staleness = status["ledger"], status["staleness"]
    buffered, in_flight = (ledger[what]["rollouts"] for what in ("buffered", "in_flight"))
    total = sum(staleness["histogram"].values())
    rows = [
        (
            stage,
            f"{rates[stage]:,.0f} tokens/s" if stage in rates else "–",
            _share(status["seconds"], before["seconds"], short),
        )
        for stage, short in _STAGES.items()
    ]
    rows += [
        (
            "version",
            f"{status['steps']:,} of {status['max_steps']:,}",
            f"{status['policy_versions_used']:,} used by generators",
        ),
        ("queue", f"{buffered + in_flight:,} rollouts", f"{buffered:,} buffered, {in_flight:,} in flight"),
        (
            "staleness",
            "–" if staleness["mean"] is None else f"mean {staleness['mean']:.2f}",
            "–" if staleness["max"] is None else f"max {staleness['max']} of {staleness['bound']}",
        ),
        *(
            (f"rollouts of staleness {value}", f"{count:,}", f"{count / total:.1%}")
            for value, count in staleness["histogram"].items()
        ),
    ]
    return [{"figure": figure, "now": now, "detail": detail} for figure, now, detail in rows]


def _share(now: dict[str, float], before: dict[str, float], stage: str) -> str:
    # A restarted stage may count from a lower value.
    busy = max(0.0, now[stage] - before[stage])
    idle = max(0.0, now[f"idle_{stage}"] - before[f"idle_{stage}"])
    return f"busy {busy / (busy + idle):.0%}, idle {idle / (busy + idle):.0%}" if busy + idle else "–"
