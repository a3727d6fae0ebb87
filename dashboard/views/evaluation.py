"""The page of a run's evaluations: which questions became right or wrong between two policy versions.

evaluations ─► two versions ─► answers of both, from the run's store ─► questions by change ─► counts, table
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from dashboard.queries.answers import CHANGES, Question, compare_answers, count_changes
from dashboard.read.answers import stored_answers
from dashboard.read.model import RunData
from dashboard.read.tokens import visible
from dashboard.views.blocks import Rows, Table, View
from dashboard.views.display import DEFAULT, Display
from dashboard.views.per_run import rows_per_run
from millrace.evaluation.answers import cut
from storage.errors import StorageError

NAME = "evaluation"
MOST_QUESTIONS = 100
"""Questions shown of each change."""
_CHARACTERS = 400
"""Shown of a text."""
_MOST_CACHED = 8
"""Comparisons that stay in memory, as an open page of a run that trains is built every second."""
_ICONS = dict(zip(CHANGES, ("✕ ", "✓ ", "", ""), strict=True))
_COLUMNS = ("change", "question", "expected", "before", "after")


def view(display: Display = DEFAULT) -> View:
    """Compares the versions that `display` names, by default the first and the newest that were evaluated."""

    def counts(runs: Sequence[RunData]) -> Rows:
        compared = _compare(runs, display)
        rows = rows_per_run(runs, ("set", *CHANGES), lambda run: _counts(compared[run.info.run_id][0]))
        return _noted(rows, compared)

    def questions(runs: Sequence[RunData]) -> Rows:
        compared = _compare(runs, display)
        every = [question for of_run, _ in compared.values() for question in of_run]
        more: dict[str, Callable[[Question], str]] = {}
        if any(any(question.right_samples) for question in every):
            more["samples right"] = lambda question: " → ".join(question.right_samples)
        if len({question.set for question in every}) > 1:
            more["set"] = lambda question: visible(question.set)
        rows = rows_per_run(
            runs,
            (*_COLUMNS, *more),
            lambda run: [
                (*_cells(question), *(cell(question) for cell in more.values()))
                for question in _first(compared[run.info.run_id][0])
            ],
        )
        return rows if every else _noted(rows, compared)

    return View(
        name=NAME,
        title="Evaluation",
        sentence="Questions of the evaluations that became right or wrong between two versions, by the greedy answers.",
        blocks=(
            Table(
                id="evaluation-changes",
                title="Right and wrong",
                sentence="An answer is right if its reward is 1 or more. Only questions that both versions were asked.",
                build=counts,
                wide=True,
            ),
            Table(
                id="evaluation-questions",
                title="Questions",
                sentence=f"The first {MOST_QUESTIONS} of each change. Long texts are cut in the middle; the run's "
                "folder has them in answers/<version>.parquet.",
                build=questions,
                wide=True,
            ),
        ),
    )


VIEW = view()


def versions(run: RunData, display: Display) -> tuple[int, int] | None:
    """Returns the two versions to compare; None if fewer than two were evaluated."""
    evaluated = run.evaluations["policy_version"].tolist()
    if len(evaluated) < 2:
        return None
    before = evaluated[0] if display.before is None else display.before
    return before, evaluated[-1] if display.after is None else display.after


def _noted(rows: Rows, compared: Mapping[str, tuple[list[Question], str]]) -> Rows:
    notes = [f"{run_id}: {note}" if len(compared) > 1 else note for run_id, (_, note) in compared.items()]
    return replace(rows, note=" ".join(notes))


def _compare(runs: Sequence[RunData], display: Display) -> dict[str, tuple[list[Question], str]]:
    """Run id → its questions, and a sentence that names the versions or says why there are no questions."""
    return {run.info.run_id: _questions(run, display) for run in runs}


def _questions(run: RunData, display: Display) -> tuple[list[Question], str]:
    pair = versions(run, display)
    if pair is None:
        return [], "Fewer than two versions were evaluated yet."
    times = dict(zip(run.evaluations["policy_version"].tolist(), run.evaluations["t"].tolist(), strict=True))
    for version in pair:
        if version not in times:
            return [], f"Version {version} was not evaluated."
    try:
        return _read(run.info.url, *((version, times[version]) for version in pair))
    except (StorageError, OSError) as error:
        return [], f"The answers can't be read: {visible(str(error))}"


@lru_cache(maxsize=_MOST_CACHED)
def _read(url: str, before: tuple[int, float], after: tuple[int, float]) -> tuple[list[Question], str]:
    """Reads and compares two versions, each with the time of its evaluation: of another one there are other answers."""
    tables = []
    for version, _ in (before, after):
        if (table := stored_answers(url, version)) is None:
            return [], f"The run has no stored answers of version {version}."
        tables.append(table)
    return compare_answers(*tables), f"Version {before[0]} before, version {after[0]} after."


def _counts(questions: Sequence[Question]) -> list[tuple[str, ...]]:
    counts = count_changes(questions)
    return [(visible(name), *(str(counts[name][change]) for change in CHANGES)) for name in counts]


def _first(questions: Sequence[Question]) -> list[Question]:
    """Returns the first questions of each change, in order."""
    of_change = [[question for question in questions if question.change == change] for change in CHANGES]
    return [question for same in of_change for question in same[:MOST_QUESTIONS]]


def _cells(question: Question) -> tuple[str, ...]:
    texts = (question.prompt, question.expected, *question.responses)
    return f"{_ICONS[question.change]}{question.change}", *map(_text, texts)


def _text(text: str) -> str:
    return "\n".join(visible(line) for line in cut(text, _CHARACTERS).split("\n"))
