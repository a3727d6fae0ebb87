"""Evaluations with answers, as the evaluate stage stores them."""

from collections.abc import Mapping, Sequence

import pyarrow as pa

from millrace.evaluation.answers import AnsweredPrompt, answers_table, write_answers
from millrace.evaluation.measures import Answered
from millrace.evaluation.results import HELD_OUT, write_result
from millrace.types import Prompt
from storage.stores.base import Store

Answers = Sequence[tuple[str, float | None]]
"""Response and reward of the greedy answer, then of the sampled ones."""


def table_of(answers: Mapping[str, Answers], name: str = HELD_OUT) -> pa.Table:
    """The answers to each prompt by its text; the reference answer is the text in capitals."""
    rows = [
        AnsweredPrompt(
            prompt=Prompt(prompt_id=f"id {text}", text=text, answer=text.upper(), source="letters"),
            answers=[Answered(response=response, answer=None, reward=reward) for response, reward in pairs],
        )
        for text, pairs in answers.items()
    ]
    return answers_table({name: rows})


def evaluate(store: Store, policy_version: int, answers: Mapping[str, Answers], *, t: float = 50.0) -> None:
    """Stores the answers to each prompt by its text, and the result of the version, done at `t` (unix seconds)."""
    accuracy = sum(pairs[0][1] or 0.0 for pairs in answers.values()) / len(answers)
    result = {"policy_version": policy_version, "accuracy": accuracy, "prompts": len(answers), "t": t}
    write_result(store, {**result, "answers": write_answers(store, policy_version, table_of(answers))})
