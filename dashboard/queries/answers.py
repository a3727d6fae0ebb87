"""Which questions of an evaluation two policy versions answered right."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc

from millrace.evaluation.measures import RIGHT

_NAMES = {
    (True, False): "right → wrong",
    (False, True): "wrong → right",
    (False, False): "still wrong",
    (True, True): "still right",
}
CHANGES = tuple(_NAMES.values())
"""The kinds of questions, in the order in which they are shown."""


@dataclass(frozen=True, kw_only=True)
class Question:
    """A question that both versions were asked, with an answer of each."""

    set: str
    """Name of the evaluation set."""
    prompt: str
    expected: str
    """Reference answer; may be empty."""
    change: str
    """One of CHANGES, by the greedy answers."""
    responses: tuple[str, str]
    """Text of both greedy answers."""
    right_samples: tuple[str, str]
    """Right ones of both versions' sampled answers, such as `3 of 8`; empty without samples."""


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
