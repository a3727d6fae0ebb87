"""What an attempt writes at its end: summary.json and a report for people.

status ─► summary.json                               as in `millrace status`
status, promotion decision, history ─► Markdown ─┬─► reports/<attempt>.md in the run
                                                 └─► artifact `campaign-report` of the flow run
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flows.display.key_figures import figures
from flows.display.plots import line_chart
from millrace.evaluation.promotion import read_decision
from millrace.runs.history import Point, accuracies, read_steps, series, throughput
from millrace.runs.record import end_attempt, read_attempt
from millrace.runs.status import StatusReader
from storage import layout
from storage.stores.base import Store

Outcome = Literal["finished", "window over", "stopped"]
"""How an attempt ended: at the run's last step, with its budget spent, or before either."""

_SENTENCES: Mapping[Outcome, str] = {
    "finished": "the run is at its end",
    "window over": "its budget is spent, and the next attempt continues from here",
    "stopped": "it was stopped; when resumed, the run continues from its latest checkpoint",
}
_MOST_POINTS = 100
"""Per line of a plot: as many as a screen shows, in a few kilobytes of the server's database."""


def write_summary(store: Store, attempt: int) -> dict[str, Any]:
    """Marks the attempt finished, or stopped if there are steps left; writes and returns the run's status."""
    reader = StatusReader(store)
    status = reader.look()
    end_attempt(store, attempt, "finished" if status["steps"] >= status["max_steps"] else "stopped")
    status = reader.look()
    store.put(layout.SUMMARY, json.dumps(status, indent=1).encode())
    return status


def write_report(store: Store, attempt: int, outcome: Outcome) -> str:
    """Stores `reports/<attempt>.md` in the run, replacing an earlier one, and returns its text.

    Raises StreamCorrupt or LedgerMismatch if the run is damaged.
    """
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
            *_changes(store, attempt),
            gate,
            f"| figure | value |\n|---|---|\n{rows}",
            *_plots(store),
            f"The run is stored at `{store.url}`.\n",
        ]
    )


def _sentence(store: Store, attempt: int, outcome: Outcome, status: dict[str, Any]) -> str:
    done = max(0, status["steps"] - read_attempt(store, attempt).first_step)
    return (
        f"In {status['wall_seconds'] / 60:.1f} minutes this attempt made {done:,} optimizer steps, to version "
        f"{status['steps']:,} of {status['max_steps']:,}: {_SENTENCES[outcome]}."
    )


def _changes(store: Store, attempt: int) -> list[str]:
    """A paragraph on the settings that differ from the attempt before it; none if none do."""
    changes = read_attempt(store, attempt).changes
    return [f"Other settings than in the attempt before it: {'; '.join(changes)}."] if changes else []


def _busy(status: dict[str, Any]) -> list[tuple[str, str]]:
    """The busy share of each stage's time over the whole run."""
    seconds = status["seconds"]
    found = []
    for stage in ("generate", "score", "train", "sync"):
        busy, idle = seconds[stage], seconds[f"idle_{stage}"]
        share = f"{busy / (busy + idle):.0%} of {busy + idle:,.0f} s" if busy + idle else "–"
        found.append((f"{stage} busy", share))
    return found


def _plots(store: Store) -> list[str]:
    """The plots that have data."""
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
