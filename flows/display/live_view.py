"""Shows a running campaign at the terminal: a live panel, or plain lines if the output is not a terminal."""

import time
from contextlib import nullcontext, suppress
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.spinner import Spinner
from rich.table import Table

from flows.display.key_figures import TRAINING, evaluation_line, figures, incident_line, phase, source_rows, time_line
from flows.display.tables import echo, new_table, plain
from millrace.errors import MillraceError
from millrace.runs.status import StatusReader
from millrace.runtime.background import Background
from millrace.runtime.devices import gpus
from millrace.runtime.messages import STOPPED
from storage.errors import StorageError
from storage.stores.base import Store

_LIVE_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
_BAR_WIDTH = 40
_IN_A_LINE = ("reward", "errors", "staleness", "trained to taken", "queue", "tokens per second")


class LiveView(Background):
    """Shows the run while its `with` block lasts."""

    def __init__(self, store: Store, console: Console) -> None:
        super().__init__("view", join_seconds=None)
        self._store = store
        self._console = console
        self._notifications = Notifications(time.time())
        self._last_line = ""

    def _run(self) -> None:
        reader: StatusReader | None = None
        preparing = Spinner("dots", "preparing the run")
        is_live = self._console.is_terminal
        with Live(preparing, console=self._console, refresh_per_second=4) if is_live else nullcontext() as live:
            over = False
            while not over:
                over = self._over.wait(_LIVE_SECONDS if live else _PLAIN_SECONDS)
                # The run may not exist yet. If its store is damaged or unreachable, the stages fail with that error.
                with suppress(MillraceError, StorageError):
                    reader = reader or StatusReader(self._store)
                    status = reader.look()
                    # Until a resumed run has started, its store still shows how it stopped.
                    if over or status["state"] == "running":
                        self._show(status, live)

    def _show(self, status: dict[str, Any], live: Live | None) -> None:
        lines = self._notifications.look(status)
        if live is not None:
            live.update(panel(status))
        elif (line := plain_line(status)) != self._last_line:
            lines.append(line)
            self._last_line = line
        echo(*lines, console=self._console)


class Notifications:
    """One line per process with GPUs, evaluation and incident of this attempt; it started at `started` (unix seconds).

    Evaluations before the first look are an earlier attempt's.
    """

    def __init__(self, started: float) -> None:
        self._started = started
        self._seen: set[str] | None = None

    def look(self, status: dict[str, Any]) -> list[str]:
        """The lines since the last look."""
        evaluations = [f"version {evaluation_line(evaluation)}" for evaluation in status["evaluations"]]
        incidents = [incident for incident in status["incidents"]["latest"] if incident["t"] >= self._started]
        if self._seen is None:
            self._seen = set(evaluations)
        places = [f"{name} on {gpus(devices)}" for name, devices in status["devices"].items()]
        lines = [line for line in (*places, *evaluations, *map(incident_line, incidents)) if line not in self._seen]
        self._seen.update(lines)
        return lines


def plain_line(status: dict[str, Any]) -> str:
    """The run in one line."""
    if (now := phase(status)).name != TRAINING:
        return str(now)
    values = dict(figures(status))
    parts = [now.name, f"step {status['steps']}/{status['max_steps']}", time_line(status)]
    return " | ".join([*parts, *(f"{name} {values[name]}" for name in _IN_A_LINE if name in values)])


def panel(status: dict[str, Any]) -> RenderableType:
    """The run as a small table, and one of its sources if there are several.

    Before anything was generated or evaluated it has no figures.
    """
    table = Table(title=plain(f"{status['run_id']}: {phase(status).name}"), title_justify="left", expand=False)
    table.add_column("figure")
    table.add_column("now", min_width=_BAR_WIDTH)
    if status["cause"] is not None:
        table.add_row("cause", plain(status["cause"]))
    table.add_row("step", ProgressBar(total=status["max_steps"], completed=status["steps"], width=_BAR_WIDTH))
    rows = [("time", time_line(status))]
    if status["steps"] or status["ledger"]["generated"]["rollouts"] or status["eval"]:
        rows += figures(status)
    alive = {name: activity for name, activity in status["doing"].items() if name in status["ready"]}
    places = {name: f" on {gpus(devices)}" for name, devices in status["devices"].items()}
    rows += [
        (name, f"{activity}{places.get(name, '')}") for name, activity in sorted(alive.items()) if activity != STOPPED
    ]
    for name, value in rows:
        table.add_row(plain(name), plain(value))
    sources = source_rows(status)
    if not sources:
        return table
    left, *right = sources[0]
    return Group(table, new_table("", left=[left], right=right, rows=[[*row.values()] for row in sources]))
