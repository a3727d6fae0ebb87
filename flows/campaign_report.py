"""The report at the end of each attempt: what a person reads the next morning.

status, decision of the gate, history ─► Markdown ─┬─► reports/<attempt>.md in the run
                                                   └─► the artifact `campaign-report` of the flow run
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flows.plots import line_chart
from flows.view import figures
from millrace.history import Point, accuracies, read_steps, series, throughput
from millrace.promotion import read_decision
from millrace.run import read_attempt
from millrace.status import StatusReader
from storage import layout
from storage.factory import open_store
from storage.store import Store

Outcome = Literal["finished", "window over", "stopped"]
"""How an attempt ended: at the run's last step, with its budget spent, or before either."""

_SENTENCES: Mapping[Outcome, str] = {
    "finished": "the run is at its end",
    "window over": "its budget is spent, and the next attempt goes on from here",
    "stopped": "it was stopped, and the run goes on from its latest checkpoint when it is resumed",
}
_MOST_POINTS = 100
"""In each line of a plot: what a screen shows, and a few kilobytes of the server's database."""


def write_report(run_url: str, attempt: int, outcome: Outcome) -> str:
    """Stores `reports/<attempt>.md` in the run, over one that is there, and returns its text.

    Raises StreamCorrupt or LedgerMismatch where the run is damaged.
    """
    store = open_store(run_url)
    markdown = _report(store, attempt, outcome)
    store.put(layout.report(attempt), markdown.encode())
    return markdown


def _report(store: Store, attempt: int, outcome: Outcome) -> str:
    status = StatusReader(store).look()
    decision = read_decision(store, attempt)
    gate = "No checkpoint was judged for promotion." if decision is None else f"Gate: {decision.sentence}."
    rows = "\n".join(f"| {name} | {value} |" for name, value in [*figures(status), *_busy(status)])
    return "\n\n".join(
        [
            f"# {status['run_id']}, attempt {attempt}: {outcome}",
            _sentence(store, attempt, outcome, status),
            gate,
            f"| figure | value |\n|---|---|\n{rows}",
            *_plots(store),
            f"The run lies at `{store.url}`.\n",
        ]
    )


def _sentence(store: Store, attempt: int, outcome: Outcome, status: dict[str, Any]) -> str:
    done = max(0, status["steps"] - read_attempt(store, attempt).first_step)
    return (
        f"In {status['wall_seconds'] / 60:.1f} minutes this attempt made {done:,} optimizer steps, to version "
        f"{status['steps']:,} of {status['max_steps']:,}: {_SENTENCES[outcome]}."
    )


def _busy(status: dict[str, Any]) -> list[tuple[str, str]]:
    """How much of its time each stage has worked, over the whole run."""
    seconds = status["seconds"]
    found = []
    for stage in ("generate", "score", "train", "sync"):
        busy, idle = seconds[stage], seconds[f"idle_{stage}"]
        share = f"{busy / (busy + idle):.0%} of {busy + idle:,.0f} s" if busy + idle else "–"
        found.append((f"{stage} busy", share))
    return found


def _plots(store: Store) -> list[str]:
    """Those that have something to show, each with its heading."""
    steps = read_steps(store)
    wanted: list[tuple[str, dict[str, Sequence[Point]]]] = [
        ("Reward", {"reward": series(steps, "reward_mean", _MOST_POINTS)}),
        ("Held-out accuracy", {"accuracy": accuracies(store, _MOST_POINTS)}),
        (
            "Staleness, policy versions",
            {
                "mean": series(steps, "staleness_mean", _MOST_POINTS),
                "largest": series(steps, "staleness_max", _MOST_POINTS, max),
            },
        ),
        ("Throughput of the trainer, response tokens per second", {"tokens/s": throughput(steps, _MOST_POINTS)}),
    ]
    return [line_chart(title, lines) for title, lines in wanted if any(lines.values())]
