"""Shows a running campaign at the terminal: a live panel, or plain lines if the output is not a terminal."""

import time
from collections import Counter, defaultdict
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
        # The panel of the run's end is printed once it has ended.
        view = Live(preparing, console=self._console, refresh_per_second=4, transient=True)
        with view if is_live else nullcontext() as live:
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

    Stages and accuracy come first: a terminal of 24 lines cuts the rest off. Before anything was generated or evaluated
    there are no figures.
    """
    title = plain(f"{status['run_id']}: {phase(status).name}")
    table = Table(title=title, title_justify="left", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(min_width=_BAR_WIDTH)
    if status["cause"] is not None:
        table.add_row("cause", plain(status["cause"]))
    table.add_row("step", ProgressBar(total=status["max_steps"], completed=status["steps"], width=_BAR_WIDTH))
    rows = [("time", time_line(status)), *_stages(status)]
    if status["steps"] or status["ledger"]["generated"]["rollouts"] or status["eval"]:
        rows += figures(status)
    for name, value in rows:
        table.add_row(plain(name), plain(value))
    sources = source_rows(status)
    if not sources:
        return table
    left, *right = sources[0]
    return Group(table, new_table("", left=[left], right=right, rows=[[*row.values()] for row in sources]))


def _stages(status: dict[str, Any]) -> list[tuple[str, str]]:
    """A row per stage at work: what its process does, or how many of several do the same."""
    alive: dict[str, list[str]] = defaultdict(list)
    for name, activity in sorted(status["doing"].items()):
        if name in status["ready"] and activity != STOPPED:
            alive[name.rpartition("-")[0]].append(name)
    rows = []
    for stage, names in alive.items():
        if len(names) > 1:
            counts = Counter(status["doing"][name] for name in names)
            doing = ", ".join(f"{count} {activity}" for activity, count in counts.most_common())
            rows.append((f"{stage} ×{len(names)}", doing))
        else:
            (name,) = names
            place = f" on {gpus(status['devices'][name])}" if name in status["devices"] else ""
            rows.append((name, f"{status['doing'][name]}{place}"))
    return rows
