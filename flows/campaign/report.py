"""The results of an attempt at its end: summary.json and a report for people.

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
from millrace.runs.record import end_attempt, read_attempt, read_end
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
_MAX_POINTS = 100
"""Most points per line of a plot: a few kilobytes in the server's database."""
_MAX_EVALUATIONS = 30
"""Most rows of the table of evaluations; the folder `evaluations` has all."""


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


def write_report(store: Store, number: int, outcome: Outcome) -> str:
    """Stores `reports/<number>.md` in the run, replacing an earlier one, and returns its text.

    Raises StreamCorrupt or LedgerMismatch if the run is damaged.
    """
    status = StatusReader(store).look()
    attempt = read_attempt(store, number)
    steps = max(0, status["steps"] - attempt.first_step)
    result = (
        f"In {status['wall_seconds'] / 60:.1f} minutes this attempt made {steps:,} optimizer steps, to version "
        f"{status['steps']:,} of {status['max_steps']:,}: {_SENTENCES[outcome]}."
    )
    if (finished := already_finished(status)) is not None:
        result += f" It was {finished}."
    if status["early_stop"] is not None:
        result += f" Training ended early: {status['early_stop']}."
    paragraphs = [f"# {status['run_id']}, attempt {number}: {outcome}", result]
    if number > 0:
        end = read_end(store, number - 1)
        if end is None:
            paragraphs.append("The attempt before it was killed.")
        elif end.state == "failed":
            paragraphs.append(f"The attempt before it failed: {end.cause}.")
    if attempt.changes:
        paragraphs.append(f"Changed since the attempt before it: {'; '.join(attempt.changes)}.")
    decision = read_decision(store, number)
    paragraphs.append("No checkpoint was judged for promotion." if decision is None else f"Gate: {decision.sentence}.")
    rows = [*figures(status), *_busy_shares(status["seconds"])]
    paragraphs.append(as_markdown([{"figure": name, "value": value} for name, value in rows]))
    paragraphs += _plots(store)
    paragraphs += [
        as_markdown(table) for table in (evaluation_rows(status)[-_MAX_EVALUATIONS:], decision_rows(status)) if table
    ]
    paragraphs.append(f"The run is stored at `{store.url}`.\n")
    markdown = "\n\n".join(paragraphs)
    store.put(layout.report(number), markdown.encode())
    return markdown


def _busy_shares(seconds: Mapping[str, float]) -> list[tuple[str, str]]:
    """The busy share of each stage's time over the whole run."""
    totals = {stage: seconds[stage] + seconds[f"idle_{stage}"] for stage in ("generate", "score", "train", "sync")}
    return [
        (f"{stage} busy", f"{seconds[stage] / total:.0%} of {total:,.0f} s" if total else "–")
        for stage, total in totals.items()
    ]


def _plots(store: Store) -> list[str]:
    """The plots that have data."""
    steps = read_steps(store)
    by_set = accuracies(ResultsReader(store).read(), _MAX_POINTS)
    accuracy = {
        name: [(version, measures["accuracy"]) for version, measures in points] for name, points in by_set.items()
    }
    intervals = {version: measures.get("accuracy_interval") for version, measures in by_set.get(HELD_OUT, ())}
    # Rewards of a single prompt have an interval without ends.
    band = [(version, *interval) for version, interval in intervals.items() if interval and None not in interval]
    staleness: dict[str, Sequence[Point]] = {
        "mean": series(steps, "staleness_mean", _MAX_POINTS),
        "largest": series(steps, "staleness_max", _MAX_POINTS, max),
    }
    plots: list[tuple[str, Mapping[str, Sequence[Point]]]] = [
        ("Reward", {"reward": series(steps, "reward_mean", _MAX_POINTS)}),
        ("Held-out accuracy" if len(accuracy) == 1 else "Accuracy by evaluation set", accuracy),
        ("Staleness, policy versions", staleness),
        ("Throughput of the trainer, response tokens per second", {"tokens/s": throughput(steps, _MAX_POINTS)}),
    ]
    return [
        line_chart(title, lines, band=band if lines is accuracy else ())
        for title, lines in plots
        if any(lines.values())
    ]
