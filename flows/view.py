"""What a person at a terminal sees of a running campaign: a live panel, or plain lines where there is no terminal."""

import time
from typing import Any

from rich.console import Console
from rich.live import Live
from rich.markup import escape
from rich.progress_bar import ProgressBar
from rich.table import Table

from millrace.background import Background
from millrace.errors import MillraceError
from millrace.status import StatusReader
from storage.errors import StorageError
from storage.store import Store

_LIVE_SECONDS = 0.5
_PLAIN_SECONDS = 5.0
TRAINING = "training"
"""The phase in which all four stages run."""


class View(Background):
    """Shows the run while its `with` block lasts."""

    def __init__(self, store: Store, console: Console) -> None:
        super().__init__("view", join_seconds=None)
        self._store = store
        self._console = console

    def _run(self) -> None:
        reader = self._wait_for_run()
        if reader is None:
            return
        rates = Rates()
        if self._console.is_terminal:
            with Live(console=self._console, refresh_per_second=4) as live:
                self._each(_LIVE_SECONDS, reader, lambda status: live.update(panel(status, rates.look(status))))
        else:
            last = ""

            def print_line(status: dict[str, Any]) -> None:
                nonlocal last
                line = plain_line(status, rates.look(status))
                if line != last:
                    self._console.print(line, markup=False, highlight=False, soft_wrap=True)
                last = line

            self._each(_PLAIN_SECONDS, reader, print_line)

    def _each(self, seconds: float, reader: StatusReader, show: Any) -> None:
        while True:
            over = self._over.wait(seconds)
            try:
                status = reader.look()
            except (MillraceError, StorageError):
                # A damaged or unreachable store: the stages meet it too, and the campaign ends with their sentence.
                if over:
                    return
                continue
            # Before a resumed run starts again, its store still shows how it stopped.
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


class Rates:
    """Response tokens per second of each stage, between two looks."""

    def __init__(self) -> None:
        self._before: tuple[float, dict[str, int]] | None = None

    def look(self, status: dict[str, Any]) -> dict[str, float]:
        """By stage; empty at the first look."""
        now, tokens = time.monotonic(), status["tokens"]
        before, self._before = self._before, (now, tokens)
        if before is None:
            return {}
        return {stage: max(0, count - before[1][stage]) / (now - before[0]) for stage, count in tokens.items()}


def phase(status: dict[str, Any]) -> str:
    """What the campaign is at, in a few words."""
    if status["state"] != "running":
        return str(status["state"])
    doing = status["doing"]
    if "train-0" not in doing:
        bootstrap = doing.get("bootstrap-0", "stopped")
        return "evaluating the start model" if bootstrap == "stopped" else f"making the start model: {bootstrap}"
    if status["steps"] >= status["stop_at_step"]:
        return "evaluating the trained model"
    return TRAINING


def plain_line(status: dict[str, Any], rates: dict[str, float]) -> str:
    """The run in one line."""
    if (now := phase(status)) != TRAINING:
        return now
    ledger, staleness = status["ledger"], status["staleness"]
    return (
        f"{now} | step {status['steps']}/{status['max_steps']} | reward {_number(status['reward_mean'])} | "
        f"staleness mean {_number(staleness['mean'])} max {_number(staleness['max'])} of {staleness['bound']} | "
        f"queue {_queue(ledger)} | " + " ".join(f"{stage} {rate:,.0f} tok/s" for stage, rate in rates.items())
    )


def panel(status: dict[str, Any], rates: dict[str, float]) -> Table:
    """The run as a small table."""
    title, _, _ = phase(status).partition(":")
    table = Table(title=f"{escape(status['run_id'])}: {title}", title_justify="left", expand=False)
    table.add_column("figure")
    table.add_column("now", min_width=40)
    table.add_row("step", ProgressBar(total=status["max_steps"], completed=status["steps"], width=40))
    for name, value in figures(status):
        table.add_row(name, value)
    for name, doing in sorted(status["doing"].items()):
        if doing != "stopped":
            rate = rates.get(name.rpartition("-")[0])
            speed = f"{rate:7,.0f} tok/s  " if rate is not None else ""
            table.add_row(name, escape(speed + doing))
    return table


def figures(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The key figures of a run, as (name, value)."""
    ledger, staleness, sync = status["ledger"], status["staleness"], status["weight_sync"]
    dropped = ", ".join(f"{reason} {amount['rollouts']}" for reason, amount in ledger["dropped"].items()) or "none"
    histogram = "  ".join(f"{value}: {count}" for value, count in staleness["histogram"].items()) or "–"
    found = [
        ("version", f"{status['steps']} of {status['max_steps']}; {status['policy_versions_used']} used by generators"),
        ("reward", _number(status["reward_mean"])),
        ("staleness", f"mean {_number(staleness['mean'])}, max {_number(staleness['max'])} of {staleness['bound']}"),
        ("rollouts by staleness", histogram),
        ("queue", f"{_queue(ledger)} rollouts on their way to the trainer"),
        ("ledger", f"{ledger['generated']['rollouts']} generated = {ledger['trained']['rollouts']} trained"),
        ("", f"+ {ledger['buffered']['rollouts']} buffered + {ledger['in_flight']['rollouts']} in flight"),
        ("", f"+ dropped: {dropped}"),
        ("weight sync", f"{sync['count']} by {sync['transport']}, median {_number(sync['p50_seconds'], 4)} s"),
    ]
    for name, result in status["eval"].items():
        found += _measured(name, result)
    return found


def _measured(name: str, result: dict[str, Any]) -> list[tuple[str, str]]:
    """An evaluation's figures; those of older runs have no intervals."""
    interval = _interval(result.get("accuracy_interval", [None, None]))
    found = [(f"accuracy at {name}", f"{result['accuracy']:.3f}{interval} of {result['prompts']} held-out prompts")]
    if "pass_at" in result:
        measures = {f"pass@{k}": estimate for k, estimate in result["pass_at"].items()}
        measures[f"majority of {result['samples']}"] = result["majority"]
        said = [f"{what} {one['value']:.3f}{_interval([one['low'], one['high']])}" for what, one in measures.items()]
        found.append((f"sampled at {name}", ", ".join(said)))
    return found


def _interval(ends: list[float | None]) -> str:
    """The 95 % interval behind a value, or nothing where none is known."""
    low, high = ends
    return "" if low is None or high is None else f" [{low:.3f}, {high:.3f}]"


def _queue(ledger: dict[str, Any]) -> int:
    """Rollouts generated and neither trained nor dropped yet."""
    queued: int = ledger["buffered"]["rollouts"] + ledger["in_flight"]["rollouts"]
    return queued


def _number(value: float | None, digits: int = 2) -> str:
    if value is None:
        return "–"
    return str(value) if isinstance(value, int) else f"{value:.{digits}f}"
