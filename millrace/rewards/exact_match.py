"""Reward 1 for the right answer, 0 for any other."""

import re

from millrace.prompts.answers import after_thoughts, comparable, last_group
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt


def extracted_answer(response: str, pattern: re.Pattern[str] | None) -> str | None:
    """The text after the last `</think>` or, of that, the first group of the last match of `pattern`."""
    answer = after_thoughts(response)
    return answer if answer is None or pattern is None else last_group(answer, pattern)


class ExactMatch(Reward):
    """Compares the answer with the prompt's as text; surrounding whitespace is ignored.

    Numbers may have separators between thousands. With a pattern it is isolated: some never end on some responses.
    Components: `exact_match` (1.0 or 0.0, the reward) and `extracted` (1.0 if the response held an answer at all).
    """

    name = "exact_match"
    version = "2"

    def __init__(self, *, answer_pattern: str | None = None) -> None:
        """`answer_pattern`: see `extracted_answer`; None takes the whole response."""
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        self.isolated = answer_pattern is not None

    def warm_up(self) -> None:
        self.score(Prompt(prompt_id="", text="", answer="", source=""), "")

    def score(self, prompt: Prompt, response: str) -> Score:
        answer = extracted_answer(response, self._pattern)
        match = float(answer is not None and comparable(answer) == comparable(prompt.answer))
        return Score(reward=match, components={"exact_match": match, "extracted": float(answer is not None)})
