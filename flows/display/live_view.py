"""Shows a running campaign at the terminal: a live panel, or plain lines if the output is no terminal."""

import time
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from flows.display.key_figures import (
    evaluation_line,
    failed_scores,
    figures,
    incident_line,
    number,
    queue_length,
    trained_to_taken,
)
from flows.display.progress import TRAINING, Rates, phase, time_line
from flows.display.terminal import plain
from millrace.errors import MillraceError
from millrace.runs.status import StatusReader
from millrace.runtime.background import Background
from millrace.runtime.messages import STOPPED
from storage.errors import StorageError
from storage.stores.base import Store

_LIVE_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
_BAR_WIDTH = 40


class View(Background):
    """Shows the run while its `with` block lasts."""

    def __init__(self, store: Store, console: Console) -> None:
        super().__init__("view", join_seconds=None)
        self._store = store
        self._console = console
        self._started = time.time()

    def _run(self) -> None:
        with self._console.status("preparing the run"):
            reader = self._wait_for_run()
        if reader is None:
            return
        rates, notifications = Rates(), Notifications(self._started)
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4) as live:

                def update(status: dict[str, Any]) -> None:
                    self._print(notifications.look(status))
                    live.update(panel(status, rates.look(status)))

                self._each(_LIVE_SECONDS, reader, update)
        else:
            last = ""

            def print_line(status: dict[str, Any]) -> None:
                nonlocal last
                line = plain_line(status, rates.look(status))
                self._print([*notifications.look(status), *([line] if line != last else [])])
                last = line

            self._each(_PLAIN_SECONDS, reader, print_line)

    def _print(self, lines: Sequence[str]) -> None:
        for line in lines:
            self._console.print(plain(line), highlight=False, soft_wrap=True)

    def _each(self, seconds: float, reader: StatusReader, show: Any) -> None:
        while True:
            over = self._over.wait(seconds)
            try:
                status = reader.look()
            except (MillraceError, StorageError):
                # A damaged or unreachable store: the stages fail too, and the campaign ends with their error.
                if over:
                    return
                continue
            # Until a resumed run has started, its store still shows how it stopped.
            if over or status["state"] == "running":
                show(status)
            if over:
                return

    def _wait_for_run(self) -> StatusReader | None:
        while True:
            try:
                return StatusReader(self._store)
            except (MillraceError, StorageError):
                if self._over.wait(_LIVE_SECONDS):
                    return None


class Notifications:
    """One line per evaluation and per incident of this attempt.

    Evaluations before the first look are known, and incidents before `started` (unix seconds).
    """

    def __init__(self, started: float) -> None:
        self._evaluations: list[dict[str, Any]] | None = None
        self._incidents: list[dict[str, Any]] = []
        self._started = started

    def look(self, status: dict[str, Any]) -> list[str]:
        """The lines of what came since the last look."""
        evaluations = status["evaluations"]
        incidents = [one for one in status["incidents"]["latest"] if one["t"] >= self._started]
        lines = [f"version {evaluation_line(one)}" for one in _new(evaluations, self._evaluations)]
        lines += [incident_line(one) for one in _new(incidents, self._incidents)]
        self._evaluations, self._incidents = evaluations, incidents
        return lines


def _new(found: list[dict[str, Any]], known: list[dict[str, Any]] | None) -> list[dict[str, Any]]:
    return [] if known is None else [one for one in found if one not in known]


def plain_line(status: dict[str, Any], rates: dict[str, float]) -> str:
    """The run in one line."""
    if (now := phase(status)).name != TRAINING:
        return str(now)
    ledger, staleness, errors = status["ledger"], status["staleness"], failed_scores(status)
    return " | ".join(
        [
            now.name,
            f"step {status['steps']}/{status['max_steps']}",
            time_line(status, rates),
            f"reward {number(status['reward_mean'])}",
            *([] if errors is None else [errors]),
            f"staleness mean {number(staleness['mean'])} max {number(staleness['max'])} of {staleness['bound']}",
            f"trained to taken: {trained_to_taken(status)}",
            f"queue {queue_length(ledger)}",
            *(f"{stage} {rate:,.0f} tok/s" for stage, rate in rates.items()),
        ]
    )


def panel(status: dict[str, Any], rates: dict[str, float]) -> Table:
    """The run as a small table. Before anything was generated or evaluated it has no figures."""
    table = Table(title=plain(f"{status['run_id']}: {phase(status).name}"), title_justify="left", expand=False)
    table.add_column("figure")
    table.add_column("now", min_width=_BAR_WIDTH)
    if status["cause"] is not None:
        table.add_row("cause", plain(status["cause"]))
    table.add_row("step", ProgressBar(total=status["max_steps"], completed=status["steps"], width=_BAR_WIDTH))
    table.add_row("time", plain(time_line(status, rates)))
    if status["steps"] or status["ledger"]["generated"]["rollouts"] or status["eval"]:
        if rates:
            table.add_row("tokens per second", ", ".join(f"{stage} {rate:,.0f}" for stage, rate in rates.items()))
        for name, value in figures(status):
            table.add_row(plain(name), plain(value))
    for name, doing in sorted(status["doing"].items()):
        if doing != STOPPED and name in status["ready"]:
            table.add_row(plain(name), plain(doing))
    return table
