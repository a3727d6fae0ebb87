"""Reward 1 for the right answer, 0 for any other."""

import re
from collections.abc import Mapping
from typing import Any

from millrace.errors import InputError
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt


class ExactMatch(Reward):
    """Compares the answer found in the response with the prompt's, blanks around either aside.

    Components: `exact_match` (1.0 or 0.0, the reward) and `extracted` (1.0 if the response held an answer at all).
    With a pattern it is isolated: there are patterns that some responses keep busy for ever.
    """

    name = "exact_match"
    version = "1"

    def __init__(self, *, answer_pattern: str | None = None) -> None:
        """Take the answer from the first group of the last match of `answer_pattern`; None takes the whole response.

        Raises InputError for a pattern that is no regular expression or has no group.
        """
        try:
            self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        except re.error as error:
            raise InputError(
                f'scoring.answer_pattern is "{answer_pattern}"; expected a regular expression ({error})'
            ) from error
        if self._pattern is not None and self._pattern.groups == 0:
            raise InputError(f'scoring.answer_pattern is "{answer_pattern}"; expected a group (...) around the answer')
        self.isolated = self._pattern is not None

    @property
    def options(self) -> Mapping[str, Any]:
        return {"answer_pattern": None if self._pattern is None else self._pattern.pattern}

    def score(self, prompt: Prompt, response: str) -> Score:
        """Judge the response: reward 1.0 or 0.0, and 0.0 too when it holds no answer."""
        answer = self._extract(response)
        match = float(answer is not None and answer.strip() == prompt.answer.strip())
        return Score(reward=match, components={"exact_match": match, "extracted": float(answer is not None)})

    def _extract(self, response: str) -> str | None:
        if self._pattern is None:
            return response
        answer: str | None = None
        for found in self._pattern.finditer(response):
            answer = found.group(1)
        return answer
