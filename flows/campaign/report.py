"""What an attempt writes at its end: summary.json and a report for people.

status ─► summary.json                               as in `millrace status`
status, promotion decision, history ─► Markdown ─┬─► reports/<attempt>.md in the run
                                                 └─► artifact `<run>-report` of the flow run
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from flows.display.key_figures import already_finished, decision_rows, evaluation_rows, figures
from flows.display.plots import line_chart
from flows.display.tables import as_markdown
from millrace.evaluation.promotion import read_decision
from millrace.evaluation.results import HELD_OUT, ResultsReader
from millrace.runs.history import Point, accuracies, read_steps, series, throughput
from millrace.runs.record import AttemptEnd, end_attempt, read_attempt, read_end
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
_MOST_ROWS = 30
"""Of the table of evaluations; the folder `evaluations` has all."""


def write_summary(store: Store, attempt: int) -> dict[str, Any]:
    """Marks the attempt finished, or stopped if there are steps left; writes and returns the run's status.

    Training that evaluations ended early has no steps left.
    """
    reader = StatusReader(store)
    status = reader.look()
    finished = status["steps"] >= status["max_steps"] or status["early_stop"] is not None
    end_attempt(store, attempt, "finished" if finished else "stopped")
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
    key_figures = [{"figure": name, "value": value} for name, value in [*figures(status), *_busy(status)]]
    tables = [table for table in (evaluation_rows(status)[-_MOST_ROWS:], decision_rows(status)) if table]
    return "\n\n".join(
        [
            f"# {status['run_id']}, attempt {attempt}: {outcome}",
            _sentence(store, attempt, outcome, status),
            *_before(store, attempt),
            *_changes(store, attempt),
            gate,
            as_markdown(key_figures),
            *_plots(store),
            *map(as_markdown, tables),
            f"The run is stored at `{store.url}`.\n",
        ]
    )


def _sentence(store: Store, attempt: int, outcome: Outcome, status: dict[str, Any]) -> str:
    done = max(0, status["steps"] - read_attempt(store, attempt).first_step)
    return (
        f"In {status['wall_seconds'] / 60:.1f} minutes this attempt made {done:,} optimizer steps, to version "
        f"{status['steps']:,} of {status['max_steps']:,}: {_SENTENCES[outcome]}."
        + ("" if (finished := already_finished(status)) is None else f" It was {finished}.")
        + ("" if status["early_stop"] is None else f" Training ended early: {status['early_stop']}.")
    )


def _before(store: Store, attempt: int) -> list[str]:
    """A paragraph on the attempt before it, if that did not end as it should."""
    end = read_end(store, attempt - 1) if attempt else AttemptEnd(state="finished")
    if end is None:
        return ["The attempt before it was killed."]
    return [f"The attempt before it failed: {end.cause}."] if end.state == "failed" else []


def _changes(store: Store, attempt: int) -> list[str]:
    """A paragraph on the settings and inputs that differ from the attempt before it; none if none do."""
    changes = read_attempt(store, attempt).changes
    return [f"Changed since the attempt before it: {'; '.join(changes)}."] if changes else []


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
        (
            "Staleness, policy versions",
            {
                "mean": series(steps, "staleness_mean", _MOST_POINTS),
                "largest": series(steps, "staleness_max", _MOST_POINTS, max),
            },
        ),
        ("Throughput of the trainer, response tokens per second", {"tokens/s": throughput(steps, _MOST_POINTS)}),
    ]
    reward, *rest = [line_chart(title, lines) if any(lines.values()) else "" for title, lines in wanted]
    return [plot for plot in (reward, _accuracy_plot(store), *rest) if plot]


def _accuracy_plot(store: Store) -> str:
    """The accuracy on each set, and the interval of the held-out prompts; empty if nothing was evaluated."""
    found = accuracies(ResultsReader(store).read(), _MOST_POINTS)
    lines = {name: [(point.version, point.value) for point in points] for name, points in found.items()}
    if not any(lines.values()):
        return ""
    band = [(point.version, *point.interval) for point in found[HELD_OUT] if point.interval is not None]
    return line_chart("Held-out accuracy" if len(lines) == 1 else "Accuracy by evaluation set", lines, band=band)
