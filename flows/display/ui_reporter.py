"""Reports a running campaign to the Prefect UI, in addition to its tasks.

    status, every 2 s ─┬─► <run>-progress       a bar, updated in place at most every 10 s
                       ├─► <run>-dashboard      a link to the run's page, once `MILLRACE_DASHBOARD_URL` is set
                       ├─► <run>-staleness      speed and share of each stage since the last table, queue, staleness
                       ├─► <run>-evaluations    accuracy of each version evaluated
                       ├─► <run>-decisions      decisions about staleness and rollbacks
                       ├─► <run>-summary        the key figures, once at the end
                       └─► nothing moves for `hang_seconds`: the event pipeline.stalled, and a line in the log

Each table stays in the server's database as a row. So one is written only if something changed, at most every 30 s, and
once at the end. A thread reads the store and reports on a best-effort basis: the campaign neither waits for the server
nor fails with it, and the run stores everything that is shown.
"""

import logging
import math
import time
from collections.abc import Callable, Mapping
from pathlib import PurePosixPath
from typing import Any

from prefect import get_run_logger
from prefect.artifacts import (
    create_link_artifact,
    create_markdown_artifact,
    create_progress_artifact,
    create_table_artifact,
    update_progress_artifact,
)

from flows.display.artifacts import artifact_key, dashboard_link
from flows.display.key_figures import Figure, decision_rows, evaluation_rows, figures, stage_figures
from flows.display.progress import STARTING_TRAINER, TRAINING, Rates, phase
from flows.display.tables import Row, as_markdown
from millrace.runs.record import latest_attempt
from millrace.runs.status import STAGES, StatusReader
from millrace.runtime.background import Background
from millrace.runtime.messages import LOADING, STARTING, STOPPED, Event
from storage.stores.factory import open_store
from tasks.events import emit

EVERY_SECONDS = 30.0
"""Least time between two tables of one kind."""
_PROGRESS_SECONDS = 10.0
"""Least time between two updates of the bar, because each is an event in the server's database."""
_POLL_SECONDS = 2.0
_FLOW = ("version", "queue", "staleness", "rollouts by staleness")
"""Key figures in the table `staleness`."""
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
        artifacts = Artifacts(PurePosixPath(self._run_url).name)
        over = False
        while not over:
            over = self._over.wait(_POLL_SECONDS)
            try:
                status = self._status.look()
                # First, because it does not wait for the server.
                self._report_stall(status)
                artifacts.look(status, over=over)
            except Exception:
                # Problems of the server do not matter: the run is the record. Its stages report problems of the run.
                _LOGGER.debug("nothing was reported to Prefect", exc_info=True)

    def _report_stall(self, status: dict[str, Any]) -> None:
        if phase(status).name not in (STARTING_TRAINER, TRAINING):
            return
        if (event := self._stalls.look(status, time.monotonic())) is not None:
            get_run_logger().warning("%s: %s", event.kind, dict(event.payload))
            emit(event.kind, self._run_url, event.payload)


class Artifacts:
    """The artifacts of the run `run_id` while it runs. `clock` is a monotonic clock in seconds."""

    def __init__(self, run_id: str, clock: Callable[[], float] = time.monotonic) -> None:
        self._run_id = run_id
        self._clock = clock
        self._rates = Rates(clock)
        self._bar: Any = None
        self._steps = -1
        self._updated = 0.0
        self._linked = False
        self._earlier: dict[str, Any] | None = None
        self._tables: dict[str, tuple[float, object]] = {}

    def look(self, status: dict[str, Any], *, over: bool) -> None:
        """Shows the changes since the last look; `over`: this is the last one.

        Raises if the server can't be reached; the next call catches up.
        """
        if self._bar is None:
            self._bar = create_progress_artifact(0.0, key=self._key("progress"), description="Optimizer steps")
        if (over or self._clock() - self._updated >= _PROGRESS_SECONDS) and status["steps"] != self._steps:
            update_progress_artifact(self._bar, 100.0 * status["steps"] / status["max_steps"])
            self._steps, self._updated = status["steps"], self._clock()
        if not self._linked and (url := dashboard_link(self._run_id)) is not None:
            create_link_artifact(url, "dashboard", key=self._key("dashboard"), description="This run, live")
            self._linked = True
        self.look_at_tables(status, over=over)
        if over:
            summary = as_markdown(_rows(figures(status)))
            create_markdown_artifact(summary, key=self._key("summary"), description="The run in figures")

    def look_at_tables(self, status: dict[str, Any], *, over: bool) -> None:
        """Writes the tables that are due. Raises as `look` does."""
        now, rates = self._clock(), self._rates.look(status)
        if self._earlier is None:
            # Shares need two statuses: this one is the start.
            self._earlier, self._tables["staleness"] = status, (now, None)
        flow = [(name, value) for name, value in figures(status) if name in _FLOW]
        moving = {name: status[name] for name in ("tokens", "steps", "ledger", "staleness")}
        evaluations, decisions = evaluation_rows(status), decision_rows(status)
        for name, rows, content, description in (
            (
                "staleness",
                _rows([*stage_figures(status, self._earlier, rates), *flow]),
                moving,
                "Speeds and shares since the last table; the rest since the start of the run",
            ),
            ("evaluations", evaluations, evaluations, "Accuracy of each version evaluated, with the 95 % interval"),
            ("decisions", decisions, decisions, "The latest decisions about staleness and rollbacks, with reasons"),
        ):
            written, shown = self._tables.get(name, (-math.inf, None))
            if not rows or content == shown or not (over or now - written >= EVERY_SECONDS):
                continue
            # An attempt that fails counts too, so that an unreachable server is not asked at each look.
            self._tables[name] = (now, shown)
            create_table_artifact(rows, key=self._key(name), description=description)
            self._tables[name] = (now, content)
            if name == "staleness":
                self._earlier = status

    def _key(self, what: str) -> str:
        return artifact_key(self._run_id, what)


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


def _rows(figure_list: list[Figure]) -> list[Row]:
    return [{"figure": name, "value": value} for name, value in figure_list]
