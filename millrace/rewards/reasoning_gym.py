"""Reward of a `reasoning_gym` task, by the task's own `score_answer`, in [0, 1].

row's source and prompt_id ─► task, seed, index ─► the entry, made again ─┐
response ─► answer ───────────────────────────────────────────────────────┴─► score_answer ─► reward
"""

import functools
from collections.abc import Sequence
from importlib.metadata import version
from typing import Any

from millrace.prompts.answers import after_thoughts, last_group
from millrace.prompts.packages import EXTRAS, PromptSource, check_installed, index_of
from millrace.rewards.base import Reward, Score
from millrace.types import Prompt

_DATASETS = 16
_ENTRIES = 1024


class ReasoningGym(Reward):
    """Scores responses to prompts of `reasoning_gym:TASK`.

    Components: `extracted` (1.0 if the response held an answer at all; else the reward is 0.0). Tasks may give partial
    rewards, some even for a wrong answer. If the installed version makes another problem of the prompt, the score is an
    error.
    """

    name = "reasoning_gym"
    isolated = True

    def __init__(self, *, answer_pattern: str | None = None, sources: Sequence[str] = ()) -> None:
        """The answer is the first group of the last match of `answer_pattern`; None takes all that follows the
        last `</think>`.

        `sources` are those of the prompts to come, as far as known, so that they are loaded before the first response's
        time begins. Raises InputError if the package is not installed.
        """
        check_installed("reasoning_gym", EXTRAS["reasoning_gym"], "scoring.reward reasoning_gym")
        self.version = f"2 reasoning_gym {version('reasoning_gym')}"
        self._answer_pattern = answer_pattern
        self._sources = [source for source in sources if PromptSource.parse(source).package == "reasoning_gym"]

    def load(self) -> None:
        import reasoning_gym  # noqa: F401 — takes seconds

        for source in self._sources:
            _dataset(source)

    def score(self, prompt: Prompt, response: str) -> Score:
        """Raises ValueError for a prompt that the task does not make, or no longer makes."""
        dataset, entry = _entry(prompt.source, index_of(prompt))
        if entry["question"] not in prompt.text:
            raise ValueError(f"{self.version} makes another problem of {prompt.prompt_id} than the one that was asked")
        answer = after_thoughts(response)
        if answer is not None and self._answer_pattern is not None:
            answer = last_group(answer, self._answer_pattern)
        if answer is None:
            return Score(reward=0.0, components={"extracted": 0.0})
        return Score(reward=float(dataset.score_answer(answer.strip(), entry)), components={"extracted": 1.0})


@functools.lru_cache(maxsize=_DATASETS)
def _dataset(source: str) -> Any:
    # Imported late: reading the reward's version must not wait for the package.
    from millrace.prompts.packages import open_dataset

    task = PromptSource.parse(source)
    if task.package != "reasoning_gym":
        raise ValueError(f'the prompt is from "{source}"; expected one of reasoning_gym')
    return open_dataset(task.name, task.arguments)


@functools.lru_cache(maxsize=_ENTRIES)
def _entry(source: str, index: int) -> tuple[Any, dict[str, Any]]:
    """The data set and its entry. Cached: a group's responses follow each other."""
    from millrace.prompts.packages import entry

    dataset = _dataset(source)
    return dataset, entry(dataset, index)
