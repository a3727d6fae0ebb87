"""Reward of a `reasoning_gym` task: what the task's own `score_answer` says, in [0, 1].

row's source and prompt_id ─► task, seed, index ─► the entry, made again ─┐
response ─► answer ───────────────────────────────────────────────────────┴─► score_answer ─► reward
"""

import functools
import re
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Any

from millrace.packages import EXTRAS, check_installed
from millrace.prompt_sources.origin import index_of, maker_of
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt

_DATASETS = 16
_ENTRIES = 1024


class ReasoningGym(Reward):
    """Judges responses to prompts of `reasoning_gym:TASK`.

    Components: `extracted` (1.0 if the response held an answer at all; else the reward is 0.0). Tasks may give parts of
    a point, some even for a wrong answer. A response to a prompt that the installed version makes differently is an
    error: its reward would be another problem's.
    """

    name = "reasoning_gym"
    isolated = True

    def __init__(self, *, answer_pattern: str | None = None, sources: Sequence[str] = ()) -> None:
        """Take the answer from the first group of the last match of `answer_pattern`; None takes the whole response.

        `sources` are those of the prompts to come, as far as they are known: so that they are loaded before the first
        response's time begins. Raises InputError where the package is not installed.
        """
        check_installed("reasoning_gym", EXTRAS["reasoning_gym"], "scoring.reward is reasoning_gym")
        self.version = f"1 reasoning_gym {version('reasoning_gym')}"
        self._answer_pattern = answer_pattern
        self._sources = [source for source in sources if maker_of(source).package == "reasoning_gym"]

    @property
    def options(self) -> Mapping[str, Any]:
        return {"answer_pattern": self._answer_pattern, "sources": self._sources}

    def load(self) -> None:
        import reasoning_gym  # noqa: F401 — takes seconds

        for source in self._sources:
            _dataset(source)

    def score(self, prompt: Prompt, response: str) -> Score:
        """What the task says of the answer. Raises ValueError for a prompt that it does not make, or not any more."""
        dataset, entry = _entry(prompt.source, index_of(prompt))
        if entry["question"] not in prompt.text:
            raise ValueError(f"{self.version} makes another problem of {prompt.prompt_id} than the one that was asked")
        answer = self._extract(response)
        if answer is None:
            return Score(reward=0.0, components={"extracted": 0.0})
        return Score(reward=float(dataset.score_answer(answer.strip(), entry)), components={"extracted": 1.0})

    def _extract(self, response: str) -> str | None:
        if self._answer_pattern is None:
            return response
        answer: str | None = None
        for found in re.finditer(self._answer_pattern, response):
            answer = found.group(1)
        return answer


@functools.lru_cache(maxsize=_DATASETS)
def _dataset(source: str) -> Any:
    # Late: whoever only asks for the reward's version should not wait for the package.
    from millrace.prompt_sources.reasoning_gym import open_dataset

    maker = maker_of(source)
    if maker.package != "reasoning_gym":
        raise ValueError(f'the prompt is from "{source}"; expected one of reasoning_gym')
    return open_dataset(maker.name, maker.arguments)


@functools.lru_cache(maxsize=_ENTRIES)
def _entry(source: str, index: int) -> tuple[Any, dict[str, Any]]:
    """The data set and its entry; kept, for a group's responses follow each other."""
    from millrace.prompt_sources.reasoning_gym import entry

    dataset = _dataset(source)
    return dataset, entry(dataset, index)
