"""Answers that a person graded, in `graded_answers.csv`: `math` accepts no wrong one and misses no right one.

At least 400 rows were labelled before the grader was read or run on them. `pytest -s` shows both graders' figures.
"""

import csv
import logging
from collections import Counter
from pathlib import Path

import math_verify
import pytest

from configs.task import ScoringConfig
from millrace.rewards.base import safe_score
from millrace.rewards.factory import make_reward
from millrace.types import Prompt

with (Path(__file__).parent / "graded_answers.csv").open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))


@pytest.fixture(scope="module")
def accepted_by_math() -> list[bool]:
    reward = make_reward(ScoringConfig(reward="math"))
    reward.load()
    prompts = [Prompt(prompt_id="p", text="?", answer=row["gold"], source="test") for row in ROWS]
    scores = [safe_score(reward, prompt, row["response"]) for prompt, row in zip(prompts, ROWS, strict=True)]
    assert [score.error for score in scores if score.error] == []
    return [score.reward == 1.0 for score in scores]


def _by_label(accepted: list[bool]) -> Counter[str]:
    """How many right ("1") and wrong ("0") answers are accepted."""
    return Counter(row["expected"] for row, is_accepted in zip(ROWS, accepted, strict=True) if is_accepted)


def test_the_table_holds_more_wrong_answers_than_right_ones() -> None:
    labels = Counter(row["expected"] for row in ROWS)
    assert len({(row["gold"], row["response"]) for row in ROWS}) == len(ROWS) >= 200
    assert set(labels) == {"0", "1"}
    assert labels["0"] > labels["1"]
    assert sum(row["labelled"].startswith("before") for row in ROWS) >= 400


@pytest.mark.parametrize("category", sorted({row["category"] for row in ROWS}))
def test_math_grades_as_a_person_does(category: str, accepted_by_math: list[bool]) -> None:
    wrong = [
        row
        for row, accepted in zip(ROWS, accepted_by_math, strict=True)
        if row["category"] == category and accepted != (row["expected"] == "1")
    ]
    assert wrong == []


@pytest.mark.slow
def test_math_grades_better_than_plain_math_verify(
    accepted_by_math: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("math_verify"), "disabled", True)
    plain = [math_verify.verify(math_verify.parse(row["gold"]), math_verify.parse(row["response"])) for row in ROWS]
    for name, accepted in (("math", accepted_by_math), ("plain math-verify", plain)):
        labels, counts = Counter(row["expected"] for row in ROWS), _by_label(accepted)
        right = f"{counts['1']} of {labels['1']} right answers score 1"
        print(f"\n{name}: {right}, and {counts['0']} of {labels['0']} wrong ones")
    assert _by_label(accepted_by_math)["0"] < _by_label(plain)["0"]
    assert _by_label(accepted_by_math)["1"] > _by_label(plain)["1"]
