"""The results of an attempt at its end: summary.json and a report for people.

status ─► summary.json                               as in `millrace status`
status, promotion decision ─► Markdown ─┬─► reports/<attempt>.md in the run
                                        └─► artifact `<run>-report` of the flow run
"""

import json
from typing import Any

from flows.display.key_figures import already_finished, decision_rows, evaluation_rows, figure_rows, source_rows
from flows.display.tables import Row, as_markdown
from millrace.evaluation.promotion import read_decision
from millrace.runs.record import end_attempt, read_attempt, read_end
from millrace.runs.status import StatusReader
from storage import layout
from storage.stores.base import Store

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


def write_report(store: Store, status: dict[str, Any]) -> str:
    """Stores `reports/<attempt>.md` in the run, from the status at the attempt's end, and returns its text."""
    number = status["attempt"]
    attempt = read_attempt(store, number)
    steps = max(0, status["steps"] - attempt.first_step)
    is_finished = status["state"] == "finished"
    outcome = "finished" if is_finished else "window over"
    sequel = "the run is at its end" if is_finished else "its budget is spent, and the next attempt continues from here"
    result = (
        f"In {status['wall_seconds'] / 60:.1f} minutes this attempt made {steps:,} optimizer steps, to version "
        f"{status['steps']:,} of {status['max_steps']:,}: {sequel}."
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
    if decision is not None and decision.promoted:
        command = f"millrace export {store.url} --to FOLDER --promoted"
        paragraphs.append(f"`{command}` writes the promoted checkpoint as a Hugging Face folder.")
    evaluations = evaluation_rows(status)[-_MAX_EVALUATIONS:]
    tables = (figure_rows(status), source_rows(status), evaluations, decision_rows(status))
    paragraphs += [as_markdown(table) for table in tables if table]
    inputs: list[Row] = [{"input": name, "content": content} for name, content in sorted(attempt.inputs.items())]
    if inputs:
        paragraphs += ["The model was trained on these inputs:", as_markdown(inputs)]
    paragraphs.append(f"The run is stored at `{store.url}`.\n")
    markdown = "\n\n".join(paragraphs)
    store.put(layout.report(number), markdown.encode())
    return markdown
