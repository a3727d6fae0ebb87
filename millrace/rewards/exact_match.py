"""Reward 1 for the right answer, 0 for any other."""

import re

from millrace.prompts.answers import last_group
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt


class ExactMatch(Reward):
    """Compares the answer in the response with the prompt's; surrounding whitespace is ignored.

    Components: `exact_match` (1.0 or 0.0, the reward) and `extracted` (1.0 if the response held an answer at all).
    With a pattern it is isolated: some patterns never end on some responses.
    """

    name = "exact_match"
    version = "1"

    def __init__(self, *, answer_pattern: str | None = None) -> None:
        """The answer is the first group of the last match of `answer_pattern`; None takes the whole response."""
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        self.isolated = answer_pattern is not None

    def warm_up(self) -> None:
        self.score(Prompt(prompt_id="", text="", answer="", source=""), "")

    def score(self, prompt: Prompt, response: str) -> Score:
        answer = response if self._pattern is None else last_group(response, self._pattern)
        match = float(answer is not None and answer.strip() == prompt.answer.strip())
        return Score(reward=match, components={"exact_match": match, "extracted": float(answer is not None)})
