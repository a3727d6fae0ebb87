"""Reward of a `reasoning_gym` task, by the task's own `score_answer`, in [0, 1].

row's source and prompt_id ─► task, seed, index ─► the entry, made again ─┐
response ─► answer ───────────────────────────────────────────────────────┴─► score_answer ─► reward
"""

import functools
import re
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from millrace.prompts.packages import EXTRAS, PromptSource, check_installed, index_of
from millrace.rewards.base import Reward, Score
from millrace.rewards.exact_match import extracted_answer
from millrace.types import Prompt

_CACHED_ENTRIES = 1024


class ReasoningGym(Reward):
    """Scores responses to prompts of `reasoning_gym:TASK`.

    Components: `extracted` (1.0 if the response held an answer at all; else the reward is 0.0). Tasks may give partial
    rewards, some even for a wrong answer. If the installed version makes another problem of the prompt, the score is an
    error.
    """

    name = "reasoning_gym"
    isolated = True

    def __init__(self, *, answer_pattern: str | None = None, sources: Sequence[str] = ()) -> None:
        """`answer_pattern`: see `extracted_answer`. `sources` are those of the prompts to come: they are loaded
        before the first response's time begins.

        Raises InputError if the package is not installed.
        """
        check_installed("reasoning_gym", EXTRAS["reasoning_gym"], "scoring.reward reasoning_gym")
        self.version = f"2 reasoning_gym {version('reasoning_gym')}"
        self._pattern = None if answer_pattern is None else re.compile(answer_pattern)
        self._sources = [source for source in sources if PromptSource.parse(source).package == "reasoning_gym"]

    def load(self) -> None:
        import reasoning_gym  # noqa: F401 — takes seconds

        for source in self._sources:
            _dataset(source)

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises ValueError for a prompt that the task does not make, or no longer makes."""
        dataset, problem = _entry(prompt.source, index_of(prompt))
        if problem["question"] not in prompt.text:
            raise ValueError(f"{self.version} makes another problem of {prompt.prompt_id} than the prompt's")
        answer = extracted_answer(response, self._pattern)
        reward = 0.0 if answer is None else float(dataset.score_answer(answer.strip(), problem))
        return Score(reward=reward, components={"extracted": float(answer is not None)})


@functools.cache
def _dataset(source: str) -> Any:
    # Imported late: reading the reward's version must not wait for the package.
    from millrace.prompts.packages import open_dataset

    task = PromptSource.parse(source)
    if task.package != "reasoning_gym":
        raise ValueError(f'the prompt is from "{source}"; expected a source reasoning_gym:TASK')
    return open_dataset(task.name, task.arguments)


@functools.lru_cache(maxsize=_CACHED_ENTRIES)
def _entry(source: str, index: int) -> tuple[Any, dict[str, Any]]:
    """Return the data set and its entry. Cached: a group's responses follow each other."""
    from millrace.prompts.packages import entry

    dataset = _dataset(source)
    return dataset, entry(dataset, index)
