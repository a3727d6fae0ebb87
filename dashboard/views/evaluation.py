"""The page of a run's evaluations: which questions became right or wrong between two policy versions.

evaluations ─► two versions ─► answers of both, from the run's store ─► questions by change ─► counts, table
"""

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from dashboard.read.model import RunData
from dashboard.read.tokens import visible
from dashboard.views.blocks import Rows, Table, View, rows_per_run
from dashboard.views.display import DEFAULT, Display
from millrace.evaluation.answers import cut, read_answers
from millrace.evaluation.measures import RIGHT
from millrace.evaluation.results import read_result
from storage.errors import StorageError
from storage.stores.factory import open_store

NAME = "evaluation"
MOST_QUESTIONS = 100
"""Questions shown of each change."""
_CHARACTERS = 400
"""Shown of a text."""
_MOST_CACHED = 8
"""Comparisons that stay in memory, as an open page of a run that trains is built every second."""
_NAMES = {
    (True, False): "right → wrong",
    (False, True): "wrong → right",
    (False, False): "still wrong",
    (True, True): "still right",
}
CHANGES = tuple(_NAMES.values())
"""The kinds of questions, in the order in which they are shown."""
_ICONS = dict(zip(CHANGES, ("✕ ", "✓ ", "", ""), strict=True))
_COLUMNS = ("change", "question", "expected", "before", "after")


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that both versions were asked, with an answer of each."""

    set: str
    prompt: str
    expected: str
    """Reference answer; may be empty."""
    change: str
    """One of CHANGES, by the greedy answers."""
    responses: tuple[str, str]
    """Text of both greedy answers."""
    right_samples: tuple[str, str]
    """Right ones of both versions' sampled answers, such as `3 of 8`; empty without samples."""


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
    """Run id → its questions, and a sentence that names the versions, or says why questions are missing."""
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
    store, tables = open_store(url), []
    for version, _ in (before, after):
        result = read_result(store, version)
        table = None if result is None else read_answers(store, result)
        if table is None:
            return [], f"The run has no stored answers of version {version}."
        tables.append(table)
    return compare_answers(*tables), f"Version {before[0]} before, version {after[0]} after."


def compare_answers(before: pa.Table, after: pa.Table) -> list[Question]:
    """Returns the questions in both tables (`schema.ANSWERS`), in the order of CHANGES and then of `after`."""
    asked = {_key(row): row for row in _rows(before)}
    pairs = [(asked[_key(row)], row) for row in _rows(after) if _key(row) in asked]
    return sorted((_question(*pair) for pair in pairs), key=lambda question: CHANGES.index(question.change))


def count_changes(questions: Sequence[Question]) -> dict[str, Counter[str]]:
    """Evaluation set → how many of its questions there are of each change."""
    counts: dict[str, Counter[str]] = {}
    for question in questions:
        counts.setdefault(question.set, Counter())[question.change] += 1
    return counts


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


def _rows(answers: pa.Table) -> list[dict[str, Any]]:
    """Returns the rows with the greedy response in place of all responses."""
    greedy = pc.list_element(answers["responses"], 0)
    rows: list[dict[str, Any]] = answers.drop_columns("responses").append_column("response", greedy).to_pylist()
    return rows


def _key(row: Mapping[str, Any]) -> tuple[str, str, str]:
    return row["set"], row["prompt_id"], row["prompt"]


def _question(before: Mapping[str, Any], after: Mapping[str, Any]) -> Question:
    return Question(
        set=after["set"],
        prompt=after["prompt"],
        expected=after["expected"],
        change=_NAMES[_is_right(before["rewards"][0]), _is_right(after["rewards"][0])],
        responses=(before["response"], after["response"]),
        right_samples=(_right_samples(before["rewards"]), _right_samples(after["rewards"])),
    )


def _is_right(reward: float | None) -> bool:
    return reward is not None and reward >= RIGHT


def _right_samples(rewards: Sequence[float | None]) -> str:
    samples = rewards[1:]
    return f"{sum(map(_is_right, samples))} of {len(samples)}" if samples else ""
